"""Predicted FLOPs: known answers."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.job.job import Job, job_from_values
from meshwright.job.presets import preset
from meshwright.plan.flops import flops, head_flops, layer_flops, recompute_flops
from meshwright.plan.place import Place
from meshwright.prove.trace import trace
from tests.ledger.test_predicted_activations import MODELS
from tests.small_jobs import small_job


def preset_job(name: str, layout: str, *, sequence: int, global_size: int) -> Job:
    values: dict[str, Any] = {
        "model": {"preset": name},
        "data": {"train": ["unused.txt"], "sequence_length": sequence},
        "batch": {"global_size": global_size},
        "precision": {"dtype": "bfloat16"},
        "layout": layout,
    }
    return job_from_values(values).resolve()


def test_narayanan() -> None:
    """Narayanan et al. 2021: F = 72 B s l h^2 (1 + s / 6h + V / 12 l h), there with all s^2 pairs of attention."""
    job = preset_job("megatron-18b", "dp=1 micro_batch=1", sequence=2048, global_size=2)
    b, s, layers, h, v = 2, 2048, 40, 6144, 51200
    counted = flops(job, Place(job, 0))
    pairs_above = 3 * 2 * b * s * s * h * layers
    assert counted.model + pairs_above == 72 * b * s * layers * h**2 + 12 * b * s * s * h * layers + 6 * b * s * h * v
    assert counted.model + pairs_above == pytest.approx(
        72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    )


def test_narayanan_with_recomputation() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16 l h) computes each whole layer again; here the down projection is left out."""
    job = preset_job("megatron-18b", "dp=1 micro_batch=1 recompute=full", sequence=2048, global_size=2)
    b, s, layers, h, v = 2, 2048, 40, 6144, 51200
    counted = flops(job, Place(job, 0))
    causal_half = 4 * 2 * b * s * s * h * layers
    down = 8 * b * s * h * h * layers
    flash = b * s * s * h * layers
    paper = 96 * b * s * layers * h**2 + 16 * b * s * s * h * layers + 6 * b * s * h * v
    assert counted.hardware + causal_half + down - flash == paper


def test_llama_by_hand() -> None:
    """Llama-3 8B, one sequence of 8,192: grouped queries, three matrices in the MLP, causal attention."""
    layer = layer_flops(preset("llama3-8b"), rows=1, sequence=8192, tp=1)
    tokens = 8192
    assert layer.qkv == 2 * tokens * 4096 * (4096 + 2 * 1024)
    assert layer.attention == 2 * 8192 * 8192 * 4096
    assert layer.output == 2 * tokens * 4096 * 4096
    assert layer.up + layer.down == 2 * tokens * 4096 * 3 * 14336
    assert recompute_flops(preset("llama3-8b"), layer, "none") == layer.attention // 2
    assert recompute_flops(preset("llama3-8b"), layer, "selective") == layer.attention * 3 // 2
    assert head_flops(preset("llama3-8b"), tokens, 3) == 2 * tokens * 4096 * 42752


def test_sliding_window_by_hand() -> None:
    """With a window w each token but the first w sees w: s w - w^2 / 2 pairs."""
    layer = layer_flops(preset("mistral-7b"), rows=2, sequence=16384, tp=2, window=4096)
    assert layer.attention == 4 * 2 * 16 * 128 * (16384 * 4096 - 4096**2 // 2)


def test_llama_405b_on_16384_ranks_adds_up() -> None:
    """The ranks of one model together compute 6 FLOPs a token and matrix element, and the attention."""
    job = preset_job("llama3-405b", "tp=8 pp=16 dp=128 micro_batch=1", sequence=8192, global_size=2048)
    spec, tokens = job.model_spec, 2048 * 8192
    matrices = sum(
        shape[0] * shape[1] for name, shape in spec.parameters() if len(shape) == 2 and "embedding" not in name
    )
    attention = 3 * spec.layers * 4 * spec.heads * spec.head_size * 8192 // 2 * tokens
    ranks = job.layout.ranks // job.layout.pp
    total = sum(ranks * flops(job, Place(job, rank)).model for rank in range(0, job.layout.ranks, ranks))
    assert total == 6 * tokens * matrices + attention


@pytest.mark.parametrize(
    ("layout", "rank", "model"),
    [
        ("tp=2 micro_batch=2 recompute=full", 0, "gpt2 with dropout"),
        ("dp=1 micro_batch=2 recompute=selective", 0, "llama with attention dropout"),
        ("tp=2 pp=2 micro_batch=1 schedule=zero-bubble", 2, "qwen3 with windows"),
    ],
)
def test_traced_program_agrees(layout: str, rank: int, model: str) -> None:
    job = small_job(layout, model=MODELS[model], optimizer={"name": "adamw"}, precision={"dtype": "bfloat16"})
    assert flops(job, Place(job, rank)) == trace(job, [rank]).ranks[0].computes
