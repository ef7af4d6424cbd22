"""The memory of a few layouts to the byte, where the search knows it within some per cent.

The search's closed form ranks millions; what is answered in the end is held against the predicted ledger, so that
nothing is said to fit that does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from meshwright.job.grid import rank_of
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.ledger.ledger import CATEGORIES
from meshwright.plan.machines import without_budget
from meshwright.plan.predict import predict


class ExactPeak(NamedTuple):
    """Of the fullest rank."""

    peak: int
    """Bytes."""
    rank: int
    largest: str
    """The category that takes most of it."""
    largest_bytes: int


class Candidate(NamedTuple):
    """A layout to be confirmed."""

    number: int
    """Of the caller."""
    layout: Layout
    estimate: float
    """Bytes by the closed form."""


def exact_peak(job: Job, layout: Layout) -> ExactPeak:
    """The peak of the first, second or last pipeline rank, whichever is fullest: those between hold no more."""
    resolved = without_budget(job).with_layout(layout).resolve(layout.ranks, purpose="plan")
    places = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    fullest = predict(resolved, [rank_of(layout, (pp, 0, 0, 0)) for pp in places]).fullest
    parts = fullest.stores.at_peak
    largest = max(CATEGORIES, key=lambda name: parts.get(name, 0))
    return ExactPeak(fullest.stores.peak, fullest.rank, largest, parts.get(largest, 0))


class Confirmer:
    """Exact peaks of the layouts it was asked about. Layouts that differ in placement alone share their answer."""

    def __init__(self, job: Job, memory: int) -> None:
        self._job, self._memory = job, memory
        self._known: dict[Layout, ExactPeak] = {}
        self._correction: dict[tuple[object, ...], float] = {}

    def exact(self, layout: Layout) -> ExactPeak:
        """The answer for one layout, remembered."""
        plain = _plain(layout)
        if plain not in self._known:
            self._known[plain] = exact_peak(self._job, plain)
        answer = self._known[plain]
        return answer._replace(rank=_placed(layout, answer.rank))

    def known(self, layout: Layout) -> ExactPeak | None:
        """The answer for a layout, where it was asked for before."""
        return self.exact(layout) if _plain(layout) in self._known else None

    def fitting(self, candidates: Iterable[Candidate]) -> Iterator[tuple[Candidate, ExactPeak]]:
        """Those that truly fit, in the order given; of several that differ in placement alone the first.

        Where the closed form was found too low for a kind of layout, others of the kind that would not fit with the
        same correction are passed over.
        """
        seen = set()
        for candidate in candidates:
            plain = _plain(candidate.layout)
            if plain in seen:
                continue
            seen.add(plain)
            kind = (plain.schedule, plain.pp, plain.recompute, plain.zero)
            if candidate.estimate * self._correction.get(kind, 0.0) > self._memory:
                continue
            answer = self.exact(candidate.layout)
            self._correction[kind] = answer.peak / candidate.estimate
            if answer.peak <= self._memory:
                yield candidate, answer


def _plain(layout: Layout) -> Layout:
    return layout.model_copy(update={"placement": None})


def _placed(layout: Layout, position: int) -> int:
    """The rank at a position of the grid."""
    return position if layout.placement is None else layout.placement[position]
