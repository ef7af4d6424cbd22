"""How many sequences each replica should take, from how long its steps took.

A replica's own time in a step (its waiting for others taken out) is close to a line in the rows ``n`` it computes
in ``k`` micro-batches:

    t(k, n) = a k + c n         a: seconds to start a micro-batch, c: seconds of a row

The slowest replica is the step's time, so with ``B`` sequences a step and at most ``b_r`` for replica ``r`` wanted is

    min over b of  max over r  t_r(b_r)      sum of b_r = B,  0 <= b_r <= most_r,  whole numbers.

Giving one sequence at a time to the replica that would then be the fastest is exact for times that never fall with
``b`` (an exchange argument; Chen et al., "Semi-dynamic load balancing", SoCC 2020, solve the continuous problem).
"""

from __future__ import annotations

import heapq
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_FEWEST = 3
"""Equal steps whose median is worth something, where there are such."""
_SPREAD = 1.25
"""The largest micro-batch must have so many times the rows of the smallest for a fit of both costs."""


@dataclass(frozen=True)
class Sample:
    """One step of one replica: micro-batches, rows in all of them, seconds without waiting."""

    micro_steps: int
    rows: int
    seconds: float

    def same_work(self, other: Sample) -> bool:
        """Whether the two steps computed the same."""
        return (self.micro_steps, self.rows) == (other.micro_steps, other.rows)


@dataclass(frozen=True)
class Line:
    """Seconds to start a micro-batch, and seconds of a row."""

    start: float
    row: float

    def seconds(self, micro_steps: int, rows: int) -> float:
        """Of a step."""
        return self.start * micro_steps + self.row * rows

    @property
    def overhead(self) -> float:
        """The start of a micro-batch in rows: what stays when the device becomes faster or slower."""
        return self.start / self.row


def fit(samples: Iterable[Sample], overhead: float = 0.0) -> Line:
    """The line through the medians of equal steps, each weighted by their number (least squares; a, c >= 0).

    Steps that differ too little say nothing of the fixed cost: then it is ``overhead`` rows, as it was found before.
    Zero, where nothing was, makes a row look dearer than it is, so that sequences move by too little rather than too
    much. Zero too where the fit would have a fixed cost below that, or free rows.

    Raises:
        ValueError: there is no sample.
    """
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.micro_steps, sample.rows].append(sample.seconds)
    if not groups:
        raise ValueError("a line needs at least one sample")
    known = {work: found for work, found in groups.items() if len(found) >= _FEWEST} or groups
    points = [(k, n, statistics.median(found), len(found)) for (k, n), found in known.items()]
    if _tells_apart([n / k for k, n, _, _ in points]):
        kk = sum(weight * k * k for k, _, _, weight in points)
        kn = sum(weight * k * n for k, n, _, weight in points)
        nn = sum(weight * n * n for _, n, _, weight in points)
        kt = sum(weight * k * t for k, _, t, weight in points)
        nt = sum(weight * n * t for _, n, t, weight in points)
        determinant = kk * nn - kn * kn
        start, row = (kt * nn - nt * kn) / determinant, (nt * kk - kt * kn) / determinant
        if start >= 0 and row > 0:
            return Line(start, row)
        overhead = 0.0
    sizes = [(n + overhead * k, t, weight) for k, n, t, weight in points]
    row = sum(weight * size * t for size, t, weight in sizes) / sum(weight * size * size for size, _, weight in sizes)
    return Line(overhead * row, row)


def _tells_apart(rows_of_a_micro_batch: Sequence[float]) -> bool:
    """Whether steps differ enough to tell the cost of a micro-batch from that of its rows, above the noise."""
    return max(rows_of_a_micro_batch) >= _SPREAD * min(rows_of_a_micro_batch)


def share_out(total: int, seconds: Sequence[Callable[[int], float]], most: Sequence[int]) -> tuple[int, ...]:
    """``total`` sequences over the replicas so that the slowest is as fast as it can be; exact.

    Args:
        total: sequences of a step.
        seconds: of each replica by its number of sequences; must never fall.
        most: sequences each can take.

    Raises:
        ValueError: the replicas cannot take them all.
    """
    if sum(most) < total:
        raise ValueError(f"{total} sequences are more than replicas of at most {tuple(most)} can take")
    taken = [0] * len(most)
    heap = [(time(1), replica) for replica, time in enumerate(seconds) if most[replica]]
    heapq.heapify(heap)
    for _ in range(total):
        _, replica = heapq.heappop(heap)
        taken[replica] += 1
        if taken[replica] < most[replica]:
            heapq.heappush(heap, (seconds[replica](taken[replica] + 1), replica))
    return tuple(taken)


def fastest_possible(total: int, micro_steps: int, lines: Sequence[Line]) -> float:
    """No division of ``total`` sequences into at least so many micro-batches has a faster step.

    It is the one in which all replicas end together, in fractions of a sequence and below none where need be.
    """
    rates = [1.0 / line.row for line in lines]
    fixed = sum(line.start * micro_steps * rate for line, rate in zip(lines, rates, strict=True))
    return (total + fixed) / sum(rates)
