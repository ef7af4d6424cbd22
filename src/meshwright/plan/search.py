"""The search: every layout of a space evaluated, the fastest that fit kept, and per family why not.

Feasibility first: only a layout whose fullest rank fits the device counts for time. Chunks are evaluated one at a
time and dropped, so that memory does not grow with the space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from meshwright.job.cluster import ClusterSpec
from meshwright.plan.arrays import Floats, Layouts
from meshwright.plan.evaluate import evaluate
from meshwright.plan.pareto import front
from meshwright.plan.space import Counts, Family, Space

KEPT = 200
"""Layouts that are timed again by event simulation."""
_POINTS_A_CHUNK = 6
_MOST_POINTS = 600

Progress = Callable[[int, int, int], None]
"""Told after each family: families done, families in all, layouts evaluated so far."""


@dataclass
class Ranked:
    """Layouts with the two figures they are ranked by, fastest first."""

    layouts: Layouts
    time: Floats
    """Seconds of a step."""
    memory: Floats
    """Bytes of the fullest rank."""

    def __len__(self) -> int:
        return len(self.layouts)

    def take(self, which: np.ndarray[tuple[int, ...], np.dtype[np.int64]] | slice) -> Ranked:
        """Some of them, in that order."""
        return Ranked(self.layouts.take(which), self.time[which], self.memory[which])

    @classmethod
    def join(cls, parts: list[Ranked]) -> Ranked:
        """All of several."""
        return cls(
            Layouts.join([part.layouts for part in parts]),
            np.concatenate([part.time for part in parts]),
            np.concatenate([part.memory for part in parts]),
        )


@dataclass
class FamilyResult:
    """What became of one family."""

    family: Family
    evaluated: int = 0
    fitting: int = 0
    best: Ranked | None = None
    """The fastest that fits; one entry."""
    closest: Ranked | None = None
    """The one that needs least memory; one entry."""


@dataclass
class Outcome:
    """What a search found."""

    counts: Counts
    families: list[FamilyResult]
    """Every family that has a legal layout."""
    best: Ranked
    """The fastest that fit, at most ``keep``."""
    pareto: Ranked
    """Of those that fit, by rising memory."""
    points: list[tuple[float, float, bool, str]] = field(default_factory=list)
    """Some layouts of all kinds for a picture: seconds, bytes, fits, family."""


def search(space: Space, cluster: ClusterSpec, *, keep: int = KEPT, progress: Progress | None = None) -> Outcome:
    """Evaluate a whole space.

    Args:
        space: which layouts there are.
        cluster: what they run on; as many devices as the space has.
        keep: how many of the fastest to return.
        progress: told how far the search is.
    """
    counts = Counts()
    empty = Ranked(Layouts.make(micro_batches=1).take(slice(0, 0)), np.empty(0), np.empty(0))
    found = Outcome(counts, [], empty, empty)
    families = space.families()
    for done, family in enumerate(families, start=1):
        result = FamilyResult(family)
        for chunk in space.chunks(family, counts):
            _take_in(found, result, chunk, space, cluster, keep)
        if result.evaluated:
            found.families.append(result)
        if progress is not None:
            progress(done, len(families), counts.legal)
    found.points = found.points[:: -(-len(found.points) // _MOST_POINTS) or 1]
    return found


def _take_in(
    found: Outcome, result: FamilyResult, chunk: Layouts, space: Space, cluster: ClusterSpec, keep: int
) -> None:
    """Evaluate one chunk and keep of it what is worth keeping."""
    values = evaluate(space.work, cluster, chunk)
    here = Ranked(chunk, values.step_time, values.peak)
    result.evaluated += len(chunk)
    result.closest = _better(result.closest, here, int(np.argmin(here.memory)), by_time=False)
    for index in np.linspace(0, len(chunk) - 1, min(_POINTS_A_CHUNK, len(chunk))).astype(int):
        point = (float(here.time[index]), float(here.memory[index]), bool(values.fits[index]), str(result.family))
        found.points.append(point)
    fitting = np.flatnonzero(values.fits)
    result.fitting += len(fitting)
    if not len(fitting):
        return
    result.best = _better(result.best, here, int(fitting[np.argmin(here.time[fitting])]), by_time=True)
    found.best = _fastest(found.best, here, fitting, keep)
    found.pareto = _front(found.pareto, here, fitting)


def _better(before: Ranked | None, here: Ranked, index: int, *, by_time: bool) -> Ranked:
    """The earlier entry or the new one; the earlier where they are equal, so that order never matters."""
    new = here.take(np.array([index]))
    if before is None:
        return new
    old_value, new_value = (before.time, new.time) if by_time else (before.memory, new.memory)
    return new if new_value[0] < old_value[0] else before


def _fastest(before: Ranked, here: Ranked, fitting: np.ndarray[tuple[int], np.dtype[np.int64]], keep: int) -> Ranked:
    bound = before.time[-1] if len(before) >= keep else np.inf
    fitting = fitting[here.time[fitting] < bound]
    if len(fitting) > keep:
        limit = np.partition(here.time[fitting], keep - 1)[keep - 1]
        fitting = fitting[here.time[fitting] <= limit]
    if not len(fitting):
        return before
    both = Ranked.join([before, here.take(fitting)])
    return both.take(np.lexsort((np.arange(len(both)), both.memory, both.time))[:keep])


def _front(before: Ranked, here: Ranked, fitting: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Ranked:
    if len(before):
        # The front's time at each layout's memory: what is slower is beaten already.
        place = np.searchsorted(before.memory, here.memory[fitting], side="right") - 1
        beaten = (place >= 0) & (before.time[np.maximum(place, 0)] <= here.time[fitting])
        fitting = fitting[~beaten]
    if not len(fitting):
        return before
    both = Ranked.join([before, here.take(fitting)])
    return both.take(front(both.memory, both.time))
