"""Slow ranks: how long each takes for its own work, against the fastest that does the same work.

Own time is a step without what the rank waited for others. The score of a rank is the best median own time among its
peers divided by its own: in (0, 1], 1 for the fastest. Peers are ranks with equal work: the same pipeline stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

LEAST_SECONDS = 0.1
"""What a slow rank costs its peers at least in each step: less is the noise of a busy machine."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank."""

    rank: int
    score: float
    own_seconds: float
    best_rank: int
    best_seconds: float


class Stragglers:
    """Keeps the last own times of every rank.

    Args:
        steps: how many of them count.
        threshold: below this score a rank is slow.
        peers_of: who does the same work as a rank, itself among them.
    """

    def __init__(self, steps: int, threshold: float, peers_of: Callable[[int], tuple[int, ...]]) -> None:
        self._steps, self._threshold, self._peers_of = steps, threshold, peers_of
        self._times: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}
        self._reported: set[int] = set()

    def step(self, rank: int, step: int, own_seconds: float) -> None:
        """A rank has finished a step."""
        if self._last.get(rank) != step:
            self._last[rank] = step
            self._times.setdefault(rank, deque(maxlen=self._steps)).append(own_seconds)

    def scores(self) -> Mapping[int, float]:
        """Of the ranks of which enough steps are known."""
        known = {rank: median(times) for rank, times in self._times.items() if len(times) == self._steps}
        return {
            rank: min(known[peer] for peer in self._peers_of(rank) if peer in known) / max(own, 1e-9)
            for rank, own in known.items()
        }

    def new_ones(self) -> list[Straggler]:
        """Ranks that have become slow; each is reported once until it is fast again."""
        scores = self.scores()
        slow = {
            rank
            for rank, score in scores.items()
            if score < self._threshold and (1.0 - score) * median(self._times[rank]) >= LEAST_SECONDS
        }
        self._reported &= slow
        found = []
        for rank in sorted(slow - self._reported):
            self._reported.add(rank)
            peers = [peer for peer in self._peers_of(rank) if peer in scores]
            best = min(peers, key=lambda peer: median(self._times[peer]))
            found.append(
                Straggler(rank, scores[rank], median(self._times[rank]), best, median(self._times[best]))
            )
        return found
