"""One shared cursor over the samples: which positions of the run's order are handed out, and which come back.

A range is handed to one worker at a time. If its gradient becomes part of an update, it is used up; if the worker
dies, is taken for dead or comes too late, the range comes back and is handed out next. So every sample is applied at
most once, and none is lost; what a dead worker had computed of it is.
"""

from __future__ import annotations

import heapq


class Cursor:
    """Ranges of ``count`` positions from ``first`` on; returned ones before fresh ones, lowest first."""

    def __init__(self, first: int, count: int, returned: list[int] | None = None) -> None:
        self.next, self.count = first, count
        self._returned = sorted(returned or [])

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
