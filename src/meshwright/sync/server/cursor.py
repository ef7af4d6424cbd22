"""One shared cursor over the samples: which positions of the run's order are handed out, and which come back.

A range is handed to one worker at a time. If its gradient becomes part of an update, it is used up; if the worker
dies, is taken for dead or comes too late, the range comes back and is handed out next. So every sample is applied at
most once, and none is lost; what a dead worker had computed of it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """Where a run stands in the order of its samples: what a checkpoint keeps of it.

    Attributes:
        next: all positions before it were handed out, and are applied but for ``returned``.
        returned: the first positions of the ranges that came back and were not handed out again.
        count: positions a range.
    """

    next: int
    returned: Sequence[int] = ()
    count: int = 1

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Position:
        """What a checkpoint's state says, of a run with servers or without, where no range comes back."""
        if not state.get("returned"):
            return cls(int(state["cursor"]))
        return cls(int(state["cursor"]), tuple(map(int, state["returned"])), int(state["returned_count"]))

    def as_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        more = {"returned": list(self.returned), "returned_count": self.count} if self.returned else {}
        return {"cursor": self.next, **more}

    def cut(self, count: int) -> Position:
        """What came back in ranges of ``count`` positions, as far as such ranges can be cut from it."""
        firsts: list[int] = []
        start = stop = -1  # of the positions in a row from which no range has been cut
        for first in sorted(self.returned):
            start, stop = start if first == stop else first, first + self.count
            while stop - start >= count:
                firsts.append(start)
                start += count
        return Position(self.next, tuple(firsts), count)

    @property
    def waiting(self) -> int:
        """Positions that came back."""
        return len(self.returned) * self.count


def passed_over(samples: int) -> str:
    """The sentence on samples that came back to the run before, and that this one will not train on."""
    plural = "s were" if samples != 1 else " was"
    return f"{samples} sample{plural} dropped before the checkpoint and not handed out again; this run passes over them"


class Cursor:
    """Ranges of ``count`` positions from ``first`` on; returned ones before fresh ones, lowest first."""

    def __init__(self, first: int, count: int, returned: Sequence[int] = ()) -> None:
        self.next, self.count = first, count
        self._returned = sorted(returned)

    def take(self) -> int:
        """The first position of a range."""
        if self._returned:
            return heapq.heappop(self._returned)
        first, self.next = self.next, self.next + self.count
        return first

    def give_back(self, first: int) -> None:
        """A range that was not applied."""
        heapq.heappush(self._returned, first)

    @property
    def returned(self) -> list[int]:
        """Ranges waiting to be handed out again."""
        return sorted(self._returned)

    @property
    def position(self) -> Position:
        """For a checkpoint."""
        return Position(self.next, tuple(self.returned), self.count)
