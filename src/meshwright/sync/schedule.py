"""A collective over messages between pairs of ranks, as data: what one rank sends and receives, round by round.

An algorithm is a function of (rank, ranks, elements) to a list of rounds; ``sync.run`` carries any of them out. All
ranks of a group have equally many rounds, and a message is sent and received in the same one:

    ring, 3 ranks, rank 1        round 0   to 2: piece 0    from 0: piece 2, added
                                 round 1   to 2: piece 2    from 0: piece 1, added       (piece 1 is now whole)
                                 round 2   to 2: piece 1    from 0: piece 0
                                 round 3   to 2: piece 0    from 0: piece 2

What a rank sends in a round is what it held before it. What arrives in a round that adds is combined with what the
rank has, in the order of the ranks that it came from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

Range = tuple[int, int]
"""(start, stop) of elements."""


@dataclass(frozen=True)
class Message:
    """Elements to or from one other rank."""

    peer: int
    ranges: tuple[Range, ...]
    """In this order; none is empty."""

    @property
    def elements(self) -> int:
        """In all."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Round:
    """What one rank does at a time."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    adds: bool = False
    """What arrives is combined with what is there; otherwise it replaces it."""


class Schedule(Protocol):
    """An algorithm, as the rounds of each rank."""

    def all_reduce(self, rank: int, ranks: int, elements: int) -> list[Round]:
        """Rounds of ``rank`` after which all ``elements`` are reduced on every rank."""

    def reduce_scatter(self, rank: int, ranks: int, row: int) -> list[Round]:
        """Rounds of ``rank`` after which elements ``[rank * row, (rank + 1) * row)`` are reduced there.

        What is outside of them may hold anything.
        """


def cut(elements: int, parts: int, index: int) -> Range:
    """The ``index``-th of ``parts`` consecutive pieces whose sizes differ by one at most, larger ones first."""
    size, larger = divmod(elements, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def messages(pairs: Iterable[tuple[int, Iterable[Range]]]) -> tuple[Message, ...]:
    """Messages (peer, ranges); empty ranges and messages without elements are left out, neighbours joined."""
    found = []
    for peer, ranges in pairs:
        joined: list[Range] = []
        for start, stop in ranges:
            if start == stop:
                continue
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        if joined:
            found.append(Message(peer, tuple(joined)))
    return tuple(found)


class TwoLevels:
    """What algorithms know that treat the ranks of one node apart from the others.

    Args:
        nodes: the node of each rank; nodes count in the order in which they first appear.
    """

    def __init__(self, nodes: tuple[int, ...]) -> None:
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(nodes):
            found.setdefault(node, []).append(rank)
        self._members = list(found.values())
        """The ranks of each node."""
        self._node = {rank: node for node, ranks in enumerate(self._members) for rank in ranks}
        """The node of each rank."""
