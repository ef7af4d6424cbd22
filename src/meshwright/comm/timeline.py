"""Where the wall time of a step goes: exclusive nested spans, so that the parts sum to the whole.

    step  |data|forward......|backward.......... |optimizer|
                   |tp|  |tp|     |tp|dp|  |dp.....|          blocked in communication: taken out of its surroundings

Only one span runs at a time: entering one pauses the one around it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from meshwright.comm.position import begin_wait, end_wait
from meshwright.ledger.ledger import BucketTimes

_active: Timeline | None = None


class Timeline:
    """Seconds by kind and detail between ``start`` and ``stop``.

    Kinds: ``data``, ``compute`` (detail: the phase), ``communication`` (the axis; every single wait is
    kept too), ``bubble``, ``checkpoint``, ``other``.

    Args:
        axis_of: names the mesh axis of a group.
        synchronise: called before the clock is read (CUDA: waits for the device, so that its work is
            charged to the span that queued it; this forbids overlap, so such a step is a bit slower).
        clock: seconds.
    """

    def __init__(
        self,
        axis_of: Callable[[dist.ProcessGroup], str],
        synchronise: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.axis_of = axis_of
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.waits: dict[str, list[float]] = defaultdict(list)
        """By axis: how long each operation blocked, in program order, the same on all ranks of a group."""
        self.receives: list[float] = []
        """How long each pipeline receive blocked."""
        self.buckets: list[BucketTimes] = []
        """Sums of gradients that have ended."""
        self.wall = 0.0
        self._synchronise, self._clock = synchronise, clock
        self._stack: list[tuple[str, str]] = []
        self._since = self._began = 0.0

    def _now(self) -> float:
        if self._synchronise is not None:
            self._synchronise()
        return self._clock()

    def elapsed(self) -> float:
        """Seconds since the step began."""
        return self._clock() - self._began

    def _charge(self, now: float) -> None:
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def start(self) -> None:
        """Begin the step; from now on this is the process's active timeline."""
        global _active
        if _active is not None:
            raise RuntimeError("a timeline is already running")
        self._stack = [("other", "")]
        self._began = self._since = self._now()
        _active = self

    def stop(self) -> None:
        """End the step."""
        global _active
        now = self._now()
        self._charge(now)
        self.wall = now - self._began
        self._stack = []
        _active = None

    @contextmanager
    def span(self, kind: str, detail: str = "") -> Iterator[None]:
        """Charge what happens inside (and outside any inner span) to ``kind`` and ``detail``."""
        self._charge(self._now())
        self._stack.append((kind, detail))
        try:
            yield
        finally:
            if self._stack:  # empty: the timeline was stopped inside the span
                self._charge(self._now())
                self._stack.pop()

    @contextmanager
    def blocked(self, group: dist.ProcessGroup, operation: str) -> Iterator[None]:
        """Charge a wait to the communication of the group's axis, or a pipeline receive to the bubble."""
        axis = self.axis_of(group)
        received = axis == "pp" and operation == "receive"
        kind, detail = ("bubble", "") if received else ("communication", axis)
        before = self.seconds[kind, detail]
        with self.span(kind, detail):
            yield
        waited = self.seconds[kind, detail] - before
        if received:
            self.receives.append(waited)
        else:
            self.waits[axis].append(waited)


def active_timeline() -> Timeline | None:
    """The running timeline of this process."""
    return _active


@contextmanager
def span(kind: str, detail: str = "") -> Iterator[None]:
    """Charge what happens inside to the active timeline; without one, nothing."""
    timeline = _active
    if timeline is None:
        yield
    else:
        with timeline.span(kind, detail):
            yield


@contextmanager
def blocked(group: dist.ProcessGroup, operation: str, sequence: int | None = None) -> Iterator[None]:
    """Report time spent waiting in ``operation`` to the active timeline, and the wait to the rank's position.

    Pipeline receives are ``"receive"``. ``sequence`` is the number that the operation was given when it started;
    absent: it starts now. Without a timeline it costs next to nothing.
    """
    timeline = _active
    began = begin_wait(group, operation, sequence)
    if timeline is None:
        yield
    else:
        with timeline.blocked(group, operation):
            yield
    end_wait(began)
