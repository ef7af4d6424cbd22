"""The optimizer against torch's, and the bits of an element wherever a shard is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.parallel.owned import Owned
from meshwright.train.optimizer import make_optimizer

ADAMW = {"name": "adamw", "betas": (0.9, 0.95), "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.1}
SGD = {"name": "sgd", "betas": (0.9, 0.95), "eps": 1e-8, "momentum": 0.9, "weight_decay": 0.1}


def owned(master: Tensor, gradient: Tensor, decay: bool = True) -> Owned:
    return Owned("stage0:w", 0, master, gradient, decay=decay, counted=True, tp_replicated=False)


def train(values: Tensor, gradients: list[Tensor], cuts: list[int], settings_: dict[str, object]) -> list[Tensor]:
    master, gradient = values.clone(), torch.zeros_like(values)
    pieces = [owned(master[a:b], gradient[a:b]) for a, b in pairwise(cuts)]
    optimizer = make_optimizer(pieces, **settings_)  # type: ignore[arg-type]
    for new in gradients:
        gradient.copy_(new)
        optimizer.step(1e-2)
    return [master, *(torch.cat(tensors) for tensors in optimizer.state().values())]


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 999), unique=True, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    which=st.sampled_from(["adamw", "sgd"]),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_where_shards_are_cut(
    cuts: list[int], dtype: torch.dtype, which: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1000, generator=generator, dtype=dtype)
    gradients = [torch.randn(1000, generator=generator, dtype=dtype) for _ in range(3)]
    chosen = ADAMW if which == "adamw" else SGD
    whole = train(values, gradients, [0, 1000], chosen)
    cut = train(values, gradients, [0, *sorted(cuts), 1000], chosen)
    for a, b in zip(whole, cut, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("decay", [True, False])
def test_adamw_equals_torch(decay: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(777, dtype=torch.float64)
    reference = torch.nn.Parameter(values.clone())
    theirs = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1 if decay else 0.0)
    piece = owned(values.clone(), torch.zeros_like(values), decay)
    ours = make_optimizer([piece], **ADAMW)  # type: ignore[arg-type]
    for _ in range(5):
        gradient = torch.randn(777, dtype=torch.float64)
        reference.grad = gradient.clone()
        piece.gradient.copy_(gradient)
        theirs.step()
        ours.step(1e-2)
    assert torch.allclose(piece.master, reference.detach(), rtol=1e-13, atol=1e-13)


def test_sgd_momentum_by_hand() -> None:
    piece = owned(torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0]), decay=False)
    optimizer = make_optimizer([piece], **SGD)  # type: ignore[arg-type]
    optimizer.step(0.1)
    assert piece.master.tolist() == pytest.approx([0.95, 2.1])
    optimizer.step(0.1)
    assert piece.master.tolist() == pytest.approx([0.95 - 0.1 * 0.95, 2.1 + 0.1 * 1.9])
