"""Which token sees which: windows, documents, padding; values and gradients against attention written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from meshwright.data.batch import Batch
from meshwright.job.model_spec import ModelSpec
from meshwright.model.attention import AttentionCore, prepare, visible
from meshwright.model.partition import Partition

SEQUENCE = 16


def spec_of(heads: int = 4, kv_heads: int = 2, **more: object) -> ModelSpec:
    return ModelSpec(
        vocabulary=11,
        hidden=8 * heads,
        layers=2,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=8,
        positions="learned",
        **more,
    )


def batch_of(documents: list[list[int]] | None, sequence: int = SEQUENCE, rows: int = 2) -> Batch:
    held = None if documents is None else torch.tensor(documents)
    rows = rows if documents is None else len(documents)
    zeros = torch.zeros(rows, sequence, dtype=torch.int64)
    return Batch(zeros, zeros, torch.arange(sequence).expand(rows, sequence), held, torch.arange(rows))


PACKED = [[0] * 5 + [1] * 1 + [2] * 10, [0] * 9 + [-1] * 7]


def by_hand(row: int, column: int, window: int | None, documents: list[int] | None) -> bool:
    if column > row or (window is not None and row - column >= window):
        return False
    return documents is None or documents[row] == documents[column]


@pytest.mark.parametrize("window", [None, 1, 4, 15, 16, 40])
@pytest.mark.parametrize("documents", [None, PACKED])
def test_visible_pairs(window: int | None, documents: list[list[int]] | None) -> None:
    seen = visible(batch_of(documents), window)
    if seen is None:
        assert documents is None and (window is None or window >= SEQUENCE)
        return
    for row, i, j in itertools.product(range(len(seen)), range(SEQUENCE), range(SEQUENCE)):
        assert bool(seen[row, i, j]) == by_hand(i, j, window, documents[row] if documents else None)


def written_out(qkv: Tensor, spec: ModelSpec, seen: list[Tensor]) -> Tensor:
    """Attention in loops over rows and heads."""
    size, group = spec.head_size, spec.heads // spec.kv_heads
    q, k, v = qkv.view(len(seen), -1, spec.heads + 2 * spec.kv_heads, size).split(
        (spec.heads, spec.kv_heads, spec.kv_heads), 2
    )
    rows = []
    for row, allowed in enumerate(seen):
        heads = []
        for head in range(spec.heads):
            scores = q[row, :, head] @ k[row, :, head // group].T / math.sqrt(size)
            heads.append(torch.softmax(scores.masked_fill(~allowed, -math.inf), -1) @ v[row, :, head // group])
        rows.append(torch.stack(heads, 1).flatten(1))
    return torch.cat(rows)


CASES = {
    "causal": (None, None), "window 4": (4, None), "documents": (None, PACKED), "documents and window": (4, PACKED),
    "padding only": (None, [[-1] * SEQUENCE, [0] * SEQUENCE]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_values_and_gradients(case: str, heads: int, kv_heads: int, dtype: torch.dtype, bound: float) -> None:
    window, documents = CASES[case]
    spec = spec_of(heads, kv_heads, sliding_window=window)
    batch = batch_of(documents)
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(2 * SEQUENCE, (heads + 2 * kv_heads) * 8, dtype=torch.float64, generator=generator).to(dtype)
    weight = torch.randn(2 * SEQUENCE, heads * 8, dtype=torch.float64, generator=generator).to(dtype)
    mask = [
        torch.tensor(
            [[by_hand(i, j, window, documents[row] if documents else None) for j in range(16)] for i in range(16)]
        )
        for row in range(2)
    ]
    results = []
    for qkv in (start.clone(), start.double()):
        qkv.requires_grad_()
        if qkv.dtype == dtype and not results:
            out = AttentionCore(spec, 0, Partition())(qkv, prepare(spec, batch, range(2), dtype, None))
            assert out.dtype == dtype and out.is_contiguous()
        else:
            out = written_out(qkv, spec, mask)
        (out * weight.to(out.dtype)).sum().backward()
        results.append((out.detach().double(), qkv.grad.double()))
    for found, expected in zip(*results, strict=True):
        assert torch.isfinite(found).all()
        assert (found - expected).abs().max() <= bound * max(1.0, float(expected.abs().max()))


def test_a_window_is_not_full_attention() -> None:
    qkv = torch.randn(SEQUENCE, 64, dtype=torch.float64)
    outs = [
        AttentionCore(spec, 0, Partition())(qkv, prepare(spec, batch_of(None, rows=1), range(2), torch.float64, None))
        for spec in (spec_of(sliding_window=4), spec_of())
    ]
    assert torch.equal(outs[0][:4], outs[1][:4])
    assert (outs[0][4:] - outs[1][4:]).abs().amax(1).min() > 1e-6


def test_only_layers_from_window_from_layer_on_have_a_window() -> None:
    spec = spec_of(sliding_window=4, window_from_layer=1)
    context = prepare(spec, batch_of(None), range(2), torch.float32, None)
    cores = [AttentionCore(spec, layer, Partition()) for layer in range(2)]
    assert context.masks[cores[0].window] is None
    assert context.masks[cores[1].window] is not None


def test_no_earlier_document_leaks() -> None:
    spec = spec_of()
    context = prepare(spec, batch_of(PACKED), range(2), torch.float64, None)
    qkv = torch.randn(2 * SEQUENCE, 64, dtype=torch.float64)
    changed = qkv.clone()
    changed[:6] += 1.0  # the first two documents of row 0
    core = AttentionCore(spec, 0, Partition())
    before, after = core(qkv, context), core(changed, context)
    assert torch.equal(before[6:], after[6:])
    assert not torch.equal(before[:6], after[:6])
