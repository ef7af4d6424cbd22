"""The global norm: once an element, by hand, and order-free where bits must not depend on the layout."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.parallel.owned import Owned
from meshwright.train.loss_scale import SMALLEST_SCALE, LossScale
from meshwright.train.norm import OrderFreeSquares, clip_coefficient, local_peak, local_square_sum


def pieces(gradient: Tensor, cuts: list[int], counted: bool = True) -> list[Owned]:
    return [
        Owned("stage0:w", a, gradient[a:b], gradient[a:b], decay=True, counted=counted, tp_replicated=False)
        for a, b in pairwise(cuts)
    ]


def test_norms_of_three_and_four_clip_both_stages_by_a_fifth() -> None:
    first = local_square_sum(pieces(torch.tensor([3.0, 0.0]), [0, 2]))
    second = local_square_sum(pieces(torch.tensor([0.0, 4.0]), [0, 2]))
    assert math.sqrt(first + second) == 5.0
    assert clip_coefficient(5.0, 1.0) == pytest.approx(0.2)


def test_no_limit_and_small_norms_leave_gradients_alone() -> None:
    assert clip_coefficient(5.0, None) == 1.0
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0


def test_ranges_that_another_rank_counts_are_left_out() -> None:
    gradient = torch.tensor([3.0, 4.0])
    assert local_square_sum(pieces(gradient, [0, 2], counted=False)) == 0.0
    assert local_peak(pieces(gradient, [0, 2], counted=False)) == 0.0


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 499), unique=True, max_size=5),
    spread=st.floats(0.0, 12.0),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_order_free_squares_have_the_same_bits_for_any_grouping(
    cuts: list[int], spread: float, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-spread, 0, 500, dtype=torch.float64)
    gradient = (torch.randn(500, generator=generator, dtype=torch.float64) * scale).to(dtype)
    whole = pieces(gradient, [0, 500])
    cut = pieces(gradient, [0, *sorted(cuts), 500])
    random.Random(seed).shuffle(cut)
    rule = OrderFreeSquares(local_peak(whole), 500)
    high, low = rule.local(whole)
    parts = [rule.local([piece]) for piece in cut]
    assert (high, low) == (sum(part[0] for part in parts), sum(part[1] for part in parts))
    exact = math.fsum(float(value) ** 2 for value in gradient.tolist())
    assert high + low == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_carries_through(bad: float) -> None:
    gradient = torch.tensor([1.0, bad])
    assert not math.isfinite(local_square_sum(pieces(gradient, [0, 2])))
    assert not math.isfinite(local_peak(pieces(gradient, [0, 2])))
    assert math.isnan(OrderFreeSquares(math.inf, 2).local(pieces(gradient, [0, 2]))[0])


def test_the_loss_scale_halves_and_doubles() -> None:
    scale = LossScale(value=8.0, growth_interval=2, enabled=True)
    scale.update(finite=False)
    assert scale.value == 4.0
    for _ in range(2):
        scale.update(finite=True)
    assert scale.value == 8.0
    scale.update(finite=True)
    scale.update(finite=False)
    scale.update(finite=True)
    assert scale.value == 4.0, "an overflow starts the count of good steps anew"
    scale.value = SMALLEST_SCALE * 1.5
    for _ in range(3):
        scale.update(finite=False)
    assert scale.value == SMALLEST_SCALE, "it never comes to zero, by which the loss would be divided"
    off = LossScale()
    off.update(finite=False)
    assert off.value == 1.0
