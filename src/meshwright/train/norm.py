"""The global gradient norm: every element of the model once, the same number on every rank, in every layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.parallel.owned import Owned

_MANTISSA_BITS = 53


def local_square_sum(owned: Sequence[Owned]) -> float:
    """Sum of squares of the gradient elements this rank counts; NaN and infinity carry through."""
    gradients = [piece.gradient for piece in owned if piece.counted and piece.gradient.numel()]
    if not gradients:
        return 0.0
    norms = torch.stack(torch._foreach_norm(gradients)).double()
    return float((norms * norms).sum())


def local_peak(owned: Sequence[Owned]) -> float:
    """Largest absolute gradient element this rank counts (NaN if any is NaN)."""
    gradients = [piece.gradient for piece in owned if piece.counted and piece.gradient.numel()]
    if not gradients:
        return 0.0
    return float(torch.stack(torch._foreach_norm(gradients, math.inf)).double().max())


class OrderFreeSquares:
    """A sum of squares whose bits do not depend on the order or the grouping of the elements.

    Each square is cut into two parts that are multiples of fixed powers of two, coarse enough that adding
    any number of them in float64 is exact (pre-rounded summation: Demmel and Nguyen 2013, "Fast
    reproducible floating-point summation", one-sided variant with two bins). So ranks may hold any slices.

    Args:
        peak: the largest absolute element over all ranks.
        count: an upper bound on the number of elements over all ranks.
    """

    def __init__(self, peak: float, count: int) -> None:
        self._finite = math.isfinite(peak)
        count_bits = max(1, count).bit_length()
        exponent = math.frexp(peak * peak)[1] if self._finite and peak > 0 else 0
        # A sum of `count` multiples of the quantum stays below 2**53 quanta: exact in float64.
        self._coarse = math.ldexp(1.5, exponent + count_bits + 1)
        quantum_exponent = exponent + count_bits + 1 - (_MANTISSA_BITS - 1)
        self._fine = math.ldexp(1.5, quantum_exponent + count_bits + 1)

    def local(self, owned: Sequence[Owned]) -> tuple[float, float]:
        """The coarse and the fine sum over this rank's counted elements; add each over all ranks."""
        if not self._finite:
            return math.nan, math.nan
        coarse, fine = 0.0, 0.0
        for piece in owned:
            if piece.counted and piece.gradient.numel():
                high, low = self._split(piece.gradient)
                coarse, fine = coarse + high, fine + low
        return coarse, fine

    def _split(self, gradient: Tensor) -> tuple[float, float]:
        squares = gradient.double().square()
        high = (squares + self._coarse).sub_(self._coarse)
        rest = squares.sub_(high)
        low = (rest + self._fine).sub_(self._fine)
        return float(high.sum()), float(low.sum())


def clip_coefficient(norm: float, limit: float | None) -> float:
    """The factor that brings ``norm`` down to ``limit``; 1 when it is below, or when there is no limit."""
    if limit is None or not norm > limit:
        return 1.0
    return limit / norm
