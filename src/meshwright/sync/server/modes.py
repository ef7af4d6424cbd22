"""When a worker may start, and when its gradient becomes part of an update.

``Clocked``: an update a clock. The samples of clock ``c`` are cut into slots; when all slots of the oldest open clock
have arrived (or, with backup workers, enough of them), their sum in slot order is update ``c + 1``.

* *synchronous*: bound 0. A worker at clock ``c`` reads exactly the parameters after update ``c``.
* *stale-synchronous* (Ho et al., NeurIPS 2013) with bound ``s``: a worker may run ahead, at clock ``c`` while the
  oldest open clock is at least ``c - s``; it reads all updates of clocks up to ``c - s - 1``, and more if there are.
* *backup workers* (Chen et al., "Revisiting distributed synchronous SGD", 2016): the first ``enough`` of the slots
  make the update, later ones are dropped and their samples handed out again.

``Arrival``: an update a push, at once (asynchronous).

Which worker computes a slot does not change the sum, so when one dies, another takes its slot and the update stays
the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.sync.server.cursor import Cursor, Position


@dataclass(frozen=True)
class Work:
    """Samples for one gradient.

    Attributes:
        clock: asynchronous: how many ranges were handed out before; else the clock.
        slot: which of ``slots`` equal parts of the ``count`` positions from ``first`` on.
        whole: the loss is divided by the valid tokens of all ``count`` samples before backward; otherwise it is
            the plain sum, and the update divides.
    """

    clock: int
    first: int
    count: int
    slot: int
    slots: int
    whole: bool

    def as_fields(self) -> dict[str, Any]:
        """The fields of a message."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Taken:
    """Works whose gradients make one update, in the order they are added; and works that came to nothing."""

    works: tuple[Work, ...]
    dropped: tuple[Work, ...] = ()


class Mode(Protocol):
    """The rule of one mode. Updates are numbered from ``begin + 1``."""

    def take(self, worker: int, alive: Collection[int]) -> Work | None:
        """Work for a worker that asks, or None while it must wait."""

    def arrived(self, work: Work) -> list[Taken]:
        """A gradient came; the updates that can be made now."""

    def give_back(self, work: Work) -> None:
        """The worker of this work is gone, or its gradient is not wanted."""

    def allow(self, step: int) -> None:
        """Hand out the samples of steps below ``step``."""

    def break_off(self, step: int) -> bool:
        """Forget all that was begun beyond this many steps, if updates are whole steps; whether they are."""

    @property
    def started(self) -> int:
        """The first step of which no samples have been handed out."""

    @property
    def position(self) -> Position:
        """Where a run goes on from that begins where this one stands; nothing may be under way."""


class Clocked:
    """See the module.

    Args:
        begin: clocks done before.
        cursor: samples handed out before.
        slots: parts of a clock's samples.
        workers: whose home a slot is: slot ``i`` is worker ``i % workers``'s.
        batch: positions a clock.
        bound: how many clocks a worker may be ahead of the oldest open one.
        enough: slots that make an update; fewer than ``slots``: the others are dropped.
        returned: ranges of a run before this one that came back (backup workers).
    """

    def __init__(
        self, *, begin: int, cursor: int, slots: int, workers: int, batch: int, bound: int = 0,
        enough: int | None = None, returned: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._begin, self._base, self._slots, self._workers = begin, cursor, slots, workers
        self._batch, self._bound, self._enough = batch, bound, enough or slots
        self.open = begin
        """The oldest clock without an update."""
        self._limit = begin
        self._out: dict[tuple[int, int], Work] = {}
        self._here: dict[tuple[int, int], Work] = {}
        self._backup = self._enough < slots
        self._cursor = Cursor(cursor, batch // self._enough, returned)

    def take(self, worker: int, alive: Collection[int]) -> Work | None:
        """See ``Mode.take``: the oldest free slot that is this worker's, or whose home is not alive."""
        for clock in range(self.open, min(self.open + self._bound + 1, self._limit)):
            for slot in range(self._slots):
                home = slot % self._workers
                if (clock, slot) in self._out or (clock, slot) in self._here:
                    continue
                if home != worker % self._workers and home in alive:
                    continue
                work = self._work(clock, slot)
                self._out[clock, slot] = work
                return work
        return None

    def _work(self, clock: int, slot: int) -> Work:
        if self._backup:
            return Work(clock, self._cursor.take(), self._cursor.count, slot, 1, whole=False)
        return Work(clock, self._base + (clock - self._begin) * self._batch, self._batch, slot, self._slots, whole=True)

    def arrived(self, work: Work) -> list[Taken]:
        """See ``Mode.arrived``."""
        self._here[work.clock, work.slot] = self._out.pop((work.clock, work.slot))
        made = []
        while sum(clock == self.open for clock, _ in self._here) >= self._enough:
            works = [self._here.pop(key) for key in sorted(self._here) if key[0] == self.open]
            late = [self._out.pop(key) for key in sorted(self._out) if key[0] == self.open]
            for each in late:
                self._cursor.give_back(each.first)
            made.append(Taken(tuple(works), tuple(late)))
            self.open += 1
        return made

    def give_back(self, work: Work) -> None:
        """See ``Mode.give_back``."""
        if self._out.pop((work.clock, work.slot), None) is not None and self._backup:
            self._cursor.give_back(work.first)

    def allow(self, step: int) -> None:
        """See ``Mode.allow``."""
        self._limit = step

    def break_off(self, step: int) -> bool:
        """See ``Mode.break_off``."""
        for work in list(self._out.values()):
            self.give_back(work)
        for work in self._here.values() if self._backup else ():
            self._cursor.give_back(work.first)
        self._here.clear()
        self._limit = step
        return True

    @property
    def started(self) -> int:
        """See ``Mode.started``."""
        return max([self.open, *(clock + 1 for clock, _ in [*self._out, *self._here])])

    @property
    def position(self) -> Position:
        """See ``Mode.position``."""
        if self._backup:
            return self._cursor.position
        return Position(self._base + (self.started - self._begin) * self._batch)


class Arrival:
    """Every push is an update, as soon as it comes.

    Args:
        begin: steps (global batches) done before.
        cursor: samples handed out before.
        pushes: how many make up a step.
        batch: positions a step.
    """

    def __init__(self, *, begin: int, cursor: int, pushes: int, batch: int) -> None:
        self._begin, self._base, self._pushes = begin, cursor, pushes
        self._cursor = Cursor(cursor, batch // pushes)
        self._limit = begin
        self._out: dict[int, Work] = {}

    def take(self, worker: int, alive: Collection[int]) -> Work | None:
        """See ``Mode.take``: whoever asks first."""
        end = self._base + (self._limit - self._begin) * self._pushes * self._cursor.count
        if not self._cursor.returned and self._cursor.next >= end:
            return None
        first = self._cursor.take()
        number = self._begin * self._pushes + (first - self._base) // self._cursor.count
        work = Work(number, first, self._cursor.count, 0, 1, whole=True)
        self._out[first] = work
        return work

    def arrived(self, work: Work) -> list[Taken]:
        """See ``Mode.arrived``."""
        return [Taken((self._out.pop(work.first),))]

    def give_back(self, work: Work) -> None:
        """See ``Mode.give_back``."""
        if self._out.pop(work.first, None) is not None:
            self._cursor.give_back(work.first)

    def allow(self, step: int) -> None:
        """See ``Mode.allow``."""
        self._limit = step

    def break_off(self, step: int) -> bool:
        """See ``Mode.break_off``."""
        return False

    @property
    def started(self) -> int:
        """See ``Mode.started``."""
        handed_out = (self._cursor.next - self._base) // self._cursor.count
        return self._begin + -(-handed_out // self._pushes)

    @property
    def position(self) -> Position:
        """See ``Mode.position``."""
        return self._cursor.position
