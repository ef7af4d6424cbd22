"""Predicted activations, temporary bytes and peaks: known answers, closed forms against the walk, and the tracer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.job.job import Job
from meshwright.job.layout import Recompute
from meshwright.job.model_spec import ModelSpec
from meshwright.job.presets import preset
from meshwright.plan.activations import (
    embedding_activations,
    head_activations,
    layer_activations,
)
from meshwright.plan.buffers import held
from meshwright.plan.extents import Extents
from meshwright.plan.layer_walk import LayerWalk
from meshwright.plan.place import Place
from meshwright.plan.tape import Tape
from meshwright.prove.trace import trace
from tests.small_jobs import MODEL, small_job

GPT2: dict[str, Any] = {
    "kv_heads": 4, "positions": "learned", "norm": "layernorm", "activation": "gelu_tanh", "gated": False,
    "qkv_bias": True, "output_bias": True, "mlp_bias": True, "tied": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "gpt2 with dropout": {**GPT2, "dropout": 0.1},
    "gpt2 with attention dropout": {**GPT2, "dropout": 0.1, "attention_dropout": 0.1},
    "qwen3 with windows": {"qk_norm": True, "sliding_window": 5, "window_from_layer": 2},
    "llama with attention dropout": {"attention_dropout": 0.1},
    "geglu": {"activation": "gelu_tanh"},
}
POLICIES: tuple[Recompute, ...] = ("none", "selective", "full")


def gpt(heads: int = 96, hidden: int = 12288, dropout: float = 0.1, attention_dropout: float = 0.1) -> ModelSpec:
    """A GPT layer with dropout, as Korthikanti et al. count it."""
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": heads, "head_size": hidden // heads}
    values = {**preset("gpt3-175b").model_dump(), **sizes, "ffn_hidden": 4 * hidden}
    return ModelSpec.model_validate({**values, "dropout": dropout, "attention_dropout": attention_dropout})


def extents(spec: ModelSpec, rows: int = 1, sequence: int = 2048, tp: int = 1, element: int = 2) -> Extents:
    return Extents(spec, rows, sequence, tp, element)


def small(x: Extents) -> int:
    """What the paper leaves out: mean and deviation of two norms, and the causal mask."""
    return 2 * 2 * int(x.own_tokens) * 2 + int(x.sequence) ** 2


@pytest.mark.parametrize("tp", [1, 8])
def test_korthikanti(tp: int) -> None:
    """Korthikanti et al. 2022, table 2: s b h (34 + 5 a s / h) / t; here probabilities are kept in float32: 7 for 5."""
    x = extents(gpt(), rows=3, tp=tp)
    s, b, h, a = 2048, 3, 12288, 96
    assert sum(layer_activations(x).values()) == (34 * s * b * h + 7 * a * s * s * b) // tp + small(x)
    # Selective recomputation: 34 s b h / t, nothing of the scores.
    assert sum(layer_activations(x, "selective").values()) == 34 * s * b * h // tp + small(x) - s * s
    # Full: the layer's input, 2 s b h; with sequence parallel split over the ranks.
    assert sum(layer_activations(x, "full").values()) == 2 * s * b * h // tp


def test_fused_attention_keeps_what_selective_recomputation_does() -> None:
    """Fused attention keeps one float32 a head and token instead of the scores."""
    x = extents(gpt(attention_dropout=0.0))
    s, h, a = 2048, 12288, 96
    assert sum(layer_activations(x).values()) == 34 * s * h + 4 * a * s + small(x) - s * s


def test_llama_layer_by_hand() -> None:
    """Llama-3 8B, 8,192 tokens in bfloat16: rotated q, k, v; log-sum-exp; gate and up; no masks, no biases."""
    x = extents(preset("llama3-8b"), sequence=8192)
    per_token = 2 * (2 * 4096 + (4096 + 2 * 1024) + 4096 + 4096 + 2 * 14336 + 14336 + 4096) + 4 * (2 + 32)
    assert sum(layer_activations(x).values()) == 8192 * per_token


def test_arrays_of_layouts() -> None:
    """The formulas take arrays of micro-batches and degrees."""
    rows, tp = np.array([1, 2, 4]), np.array([1, 2, 8])
    whole = sum(layer_activations(Extents(preset("qwen3-8b"), rows, 4096, tp, 2)).values())
    for index in range(3):
        one = Extents(preset("qwen3-8b"), int(rows[index]), 4096, int(tp[index]), 2)
        assert whole[index] == sum(layer_activations(one).values())


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("policy", POLICIES)
def test_closed_form_is_what_the_walk_leaves(model: dict[str, Any], policy: Recompute) -> None:
    spec = ModelSpec.model_validate({**MODEL, **model})
    for tp, element, masked in ((1, 4, False), (2, 2, True), (2, 8, False)):
        x = Extents(spec, 3, 16, tp, element, masked)
        walk = LayerWalk(x, Tape())
        walk.embedding()
        assert walk.tape.kept == sum(embedding_activations(x).values())
        walk.layer(policy)
        walk.head()
        parts = (embedding_activations(x), layer_activations(x, policy), head_activations(x))
        assert walk.tape.kept == sum(sum(part.values()) for part in parts)
        walk.head_backward(tied=False)
        walk.layer_backward(policy, 0)
        walk.embedding_backward(tied=False)
        assert walk.tape.kept == x.wide, "backward frees everything but the loss"
        assert walk.tape.used == x.wide, "and leaves the gradient of the loss to its caller"


def agrees(job: Job, rank: int) -> None:
    """Equal activations; temporary bytes and peak within 3 %."""
    traced = trace(job, [rank]).ranks[0].stores
    mine = held(job, Place(job, rank))
    label = f"{job.layout} rank {rank}"
    assert mine.activations == traced.activations, label
    assert mine.temporary == pytest.approx(traced.temporary, rel=0.03), label
    both = traced.at_peak["activations"] + traced.at_peak["temporary"]
    assert sum(mine.at_peak) == pytest.approx(both, rel=0.03), label


@pytest.mark.parametrize(
    ("layout", "rank", "model", "dtype"),
    [
        ("dp=1 micro_batch=4 recompute=selective", 0, "gpt2 with attention dropout", "float32"),
        ("tp=2 micro_batch=8 recompute=full", 1, "qwen3 with windows", "bfloat16"),
        ("dp=2 zero=3 micro_batch=2", 1, "llama", "bfloat16"),
        ("pp=2 micro_batch=1 schedule=zbv", 1, "llama", "float64"),
        ("tp=2 pp=2 micro_batch=1", 2, "gpt2", "float32"),
    ],
)
def test_traced_program_agrees(layout: str, rank: int, model: str, dtype: str) -> None:
    agrees(small_job(layout, model=MODELS[model], optimizer={"name": "adamw"}, precision={"dtype": dtype}), rank)
