"""Medians of interleaved rounds, and how sure they are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.90
RESAMPLES = 10_000


@dataclass(frozen=True)
class Ratio:
    """A median of per-round ratios with its bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(theirs: Sequence[float], ours: Sequence[float], seed: int = 0) -> Ratio:
    """How many times faster we are: their seconds over ours, round by round.

    Rounds lie next to each other in time, so what slows the machine for a while slows both and cancels. The interval
    is the percentile bootstrap (Efron 1979) of the median over rounds.

    Raises:
        ValueError: the rounds cannot be paired.
    """
    if len(theirs) != len(ours) or not ours:
        raise ValueError(f"{len(theirs)} and {len(ours)} rounds cannot be paired; both need the same number above 0")
    ratios = np.asarray(theirs) / np.asarray(ours)
    draws = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)
