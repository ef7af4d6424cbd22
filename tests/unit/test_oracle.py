"""The one-device oracle against torch's own optimizers and ``transformers``' own network."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
import torch
import torch.nn.functional as F

from meshwright.data.batch import Batch
from meshwright.job.model_spec import ModelSpec
from meshwright.job.sections import OptimizerSection
from meshwright.model.initialise import initialise
from meshwright.model.transformer import StageModel
from meshwright.prove.oracle import Oracle, rate

SPEC = ModelSpec(vocabulary=41, hidden=16, layers=2, heads=4, kv_heads=2, ffn_hidden=24, qkv_bias=True, tied=True)
ROWS, SEQUENCE, STEPS = 8, 10, 6
RATES = [0.05, 0.05, 0.02, 0.05, 0.01, 0.05]


def model_of(dtype: torch.dtype = torch.float64) -> StageModel:
    model = StageModel(SPEC, range(SPEC.layers), first=True, last=True).to(dtype)
    initialise(model, 1)
    return model


def batches_of(step: int, rows: int = ROWS) -> list[Batch]:
    """One global batch with very unequal rows, in micro-batches of ``rows``."""
    generator = torch.Generator().manual_seed(step)
    stream = torch.randint(0, SPEC.vocabulary, (ROWS, SEQUENCE + 1), generator=generator)
    labels = stream[:, 1:].clone()
    for row in range(ROWS):
        labels[row, (row * 7) % SEQUENCE :] = -100
    positions = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
    parts = [slice(start, start + rows) for start in range(0, ROWS, rows)]
    return [Batch(stream[p, :-1], labels[p], positions[p], None, torch.arange(ROWS)[p]) for p in parts]


Name = Literal["sgd", "adamw"]


def by_torch(name: Name, clip: float | None, decay: float) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = model_of()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    if name == "sgd":
        optimizer: Any = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-6)
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        (batch,) = batches_of(step)
        optimizer.zero_grad()
        logits = model.logits(None, batch)
        loss = F.cross_entropy(logits, batch.labels.reshape(-1))
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if clip is not None:
            # torch divides by norm + 1e-6; the contract by the norm
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm - 1e-6)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, dict(model.named_parameters())


def by_oracle(name: Name, clip: float | None, decay: float, rows: int, dtype: torch.dtype = torch.float64) -> Any:
    start = model_of(torch.float64 if dtype == torch.float64 else torch.float32)
    oracle = Oracle(
        start,
        dtype=dtype,
        optimizer=name,
        momentum=0.9,
        eps=1e-6,
        betas=(0.9, 0.95),
        weight_decay=decay,
        clip_norm=clip,
    )
    losses, norms = [], []
    for step in range(STEPS):
        loss, norm, _ = oracle.step(batches_of(step, rows), RATES[step])
        losses.append(loss)
        norms.append(norm)
    return losses, norms, oracle


@pytest.mark.parametrize("rows", [8, 4, 1])
@pytest.mark.parametrize(("name", "decay"), [("sgd", 0.0), ("adamw", 0.1)])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_equals_torch_s_optimizers_whatever_the_accumulation(
    name: Name, decay: float, clip: float | None, rows: int
) -> None:
    expected_losses, expected_norms, expected = by_torch(name, clip, decay)
    losses, norms, oracle = by_oracle(name, clip, decay, rows)
    assert numpy.allclose(losses, expected_losses, rtol=1e-12, atol=0)
    assert numpy.allclose(norms, expected_norms, rtol=1e-12, atol=0)
    if clip is not None:
        assert max(norms) > clip
    for fqn, parameter in expected.items():
        assert (oracle.masters[fqn] - parameter).abs().max() <= 1e-10


def test_weight_decay_is_decoupled_and_spares_vectors() -> None:
    oracle = by_oracle("sgd", None, 0.0, 8)[2]
    before = {name: value.clone() for name, value in oracle.masters.items()}
    oracle.first = {name: torch.zeros_like(value) for name, value in before.items()}
    oracle.weight_decay = 0.5
    for name, value in before.items():
        oracle._update(name, torch.zeros_like(value), 0.1)
        expected = value * 0.95 if value.dim() == 2 else value
        assert (oracle.masters[name] - expected).abs().max() < 1e-15


def test_bfloat16_keeps_float32_masters() -> None:
    losses, _, oracle = by_oracle("sgd", None, 0.0, 4, dtype=torch.bfloat16)
    wide, _, _ = by_oracle("sgd", None, 0.0, 4)
    assert all(value.dtype == torch.float32 for value in oracle.masters.values())
    assert all(parameter.dtype == torch.bfloat16 for parameter in oracle.model.parameters())
    assert numpy.allclose(losses, wide, rtol=0.02)


def test_logical_tensors_are_whole_and_named() -> None:
    oracle = by_oracle("sgd", None, 0.0, 8)[2]
    found = oracle.logical(oracle.masters)
    assert {name: array.shape for name, array in found.items()} == dict(SPEC.parameters())
    q = found["layers.1.attention.q.weight"]
    assert numpy.array_equal(q, oracle.masters["layers.1.attention.qkv.weight"][: len(q)].numpy())


def test_rates_at_the_edges() -> None:
    def at(step: int, **more: object) -> float:
        return rate(OptimizerSection(lr=2.0, warmup_steps=4, min_lr_ratio=0.1, **more), step, 24)  # type: ignore[arg-type]

    assert [at(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    for schedule in ("cosine", "linear"):
        assert at(4, schedule=schedule) == 2.0
        assert at(14, schedule=schedule) == pytest.approx(1.1)
        assert at(24, schedule=schedule) == pytest.approx(0.2)
    assert at(9, schedule="cosine") == pytest.approx(0.2 + 0.9 * (1 + math.cos(math.pi / 4)))
    assert at(19, schedule="wsd", decay_steps=5) == 2.0
    assert at(24, schedule="wsd", decay_steps=5) == pytest.approx(0.2)


def test_the_oracle_imports_none_of_what_it_proves() -> None:
    code = (
        "import sys, meshwright.prove.oracle\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('meshwright.')}\n"
        "print(sorted(rooms & {'comm', 'parallel', 'sync', 'train', 'schedule', 'checkpoint'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout


def test_three_steps_equal_a_transformers_loop(tmp_path: Path) -> None:
    """The same steps by ``transformers``' network and torch's SGD, in float64."""
    transformers = pytest.importorskip("transformers")
    from meshwright.job.hf_config import spec_from_hf
    from meshwright.model.hugging_face import load_into

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=41, n_embd=16, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).double()
    theirs.save_pretrained(tmp_path)
    spec = spec_from_hf(config.to_dict())
    ours = StageModel(spec, range(2), first=True, last=True).double()
    load_into(ours, tmp_path)
    oracle = Oracle(ours, optimizer="sgd")
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for step in range(3):
        (whole,) = batches_of(step)
        optimizer.zero_grad()
        expected = F.cross_entropy(theirs(whole.tokens).logits.flatten(0, 1), whole.labels.reshape(-1))
        expected.backward()
        optimizer.step()
        loss, _, _ = oracle.step(batches_of(step, 2), 0.5)
        assert abs(loss - expected.item()) < 1e-12
    assert (oracle.masters["embedding.weight"] - theirs.transformer.wte.weight).abs().max() < 1e-12
