"""Where this rank is, in memory that a monitor may read: step, phase, micro-batch, and the collective it is in.

    word 0      1           2     3      4            5        6          7      8
         beats  changed at  step  phase  micro-batch  waiting  operation  group  sequence
    word 10              11           12          13           14       15
         steps finished  finished at  own time    state after  process  port of the store
    word 16 ...                           48 ...
         operations started, by group     text: the groups, [axis, [ranks]]

Times are nanoseconds of the host's monotonic clock. *Own time* is what the last finished step took without what
it waited for others. Without ``attach`` nothing is written. One thread (the
one that attached, or that of autograd) writes.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

BEATS, CHANGED, STEP, PHASE, MICRO_BATCH, WAITING, OPERATION, GROUP, SEQUENCE = range(9)
FINISHED, FINISHED_AT, OWN, STATE_STEP, PROCESS, PORT = range(10, 16)
_STARTED, _GROUPS = 16, 32
_WORDS = _STARTED + _GROUPS
_LAYOUT = struct.Struct(f"{_WORDS}q")
SIZE: Final = 8192
"""Bytes of the memory."""

PHASES: Final = (
    "none", "setup", "data", "batch", "forward", "recompute", "backward", "reduce", "optimizer", "publish", "metrics",
    "evaluate", "checkpoint", "end",
)  # fmt: skip
OPERATIONS: Final = (
    "other", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier", "send", "receive",
    "exchange", "gather", "scatter",
)  # fmt: skip
_PHASE = {name: number for number, name in enumerate(PHASES)}
_OPERATION = {name: number for number, name in enumerate(OPERATIONS)}
ONE_SIDED: Final = frozenset(("send", "receive", "exchange"))
"""Operations whose numbers differ between the ranks of a group."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """What one reading of a rank's memory says."""

    process: int
    """0: the rank has not attached yet."""
    beats: int
    changed: float
    """When it last wrote, in seconds of the host's monotonic clock."""
    step: int
    """The step it works on, from 1; 0 before the first."""
    phase: str
    micro_batch: int
    waiting: bool
    operation: str
    group: int
    """Number of the group in ``groups`` that it waits in; -1: another."""
    sequence: int
    """Which operation of that group, from 1."""
    finished: int
    finished_at: float
    own_seconds: float
    state_step: int
    """Which step its parameters and optimizer are the state after; -1 while they are being changed."""
    port: int
    started: tuple[int, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    """Axis and global ranks of each of its groups."""

    @property
    def axis(self) -> str:
        """The axis of the group it waits in."""
        return self.groups[self.group][0] if 0 <= self.group < len(self.groups) else "other"

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the group it waits in."""
        return self.groups[self.group][1] if 0 <= self.group < len(self.groups) else ()

    def started_in(self, members: Sequence[int], axis: str) -> int | None:
        """How many operations it has started in its group of these ranks on this axis; None: it has none such."""
        wanted = (axis, tuple(members))
        return self.started[self.groups.index(wanted)] if wanted in self.groups else None


def read(memory: mmap.mmap) -> Position:
    """What a rank says of itself."""
    words = _LAYOUT.unpack_from(memory)
    text = memory[_WORDS * 8 : SIZE].partition(b"\0")[0]
    return Position(
        process=words[PROCESS],
        beats=words[BEATS],
        changed=words[CHANGED] / 1e9,
        step=words[STEP],
        phase=PHASES[words[PHASE]],
        micro_batch=words[MICRO_BATCH],
        waiting=bool(words[WAITING]),
        operation=OPERATIONS[words[OPERATION]],
        group=words[GROUP],
        sequence=words[SEQUENCE],
        finished=words[FINISHED],
        finished_at=words[FINISHED_AT] / 1e9,
        own_seconds=words[OWN] / 1e9,
        state_step=words[STATE_STEP],
        port=words[PORT],
        started=tuple(words[_STARTED:]),
        groups=_groups(text),
    )


@lru_cache(maxsize=1024)
def _groups(text: bytes) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The groups of a rank, which are read often and written once."""
    said: list[tuple[str, list[int]]] = json.loads(text) if text else []
    return tuple((axis, tuple(ranks)) for axis, ranks in said)


def write_port(memory: mmap.mmap, port: int) -> None:
    """Say where the store listens."""
    struct.pack_into("q", memory, 8 * PORT, port)


class _Writer:
    """This process's memory."""

    def __init__(self, memory: mmap.mmap, process: int) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("q")
        self.thread = threading.get_ident()
        self.groups: dict[str, int] = {}
        self.table: list[tuple[str, tuple[int, ...]]] = []
        self.waited = 0
        self.began = time.monotonic_ns()
        self.words[PROCESS] = process

    def beat(self) -> None:
        self.words[CHANGED] = time.monotonic_ns()
        self.words[BEATS] += 1


_here: _Writer | None = None


def attach(memory: mmap.mmap | None, process: int = 0) -> None:
    """From now on write into ``memory`` (``SIZE`` bytes, zero); None: no more."""
    global _here
    _here = None if memory is None else _Writer(memory, process)
    if _here is not None:
        _here.beat()


def name_group(name: str, axis: str, ranks: Sequence[int]) -> None:
    """Say which axis and ranks the process group ``name`` joins."""
    here = _here
    if here is None or name in here.groups or len(here.table) >= _GROUPS:
        return
    table = [*here.table, (axis, tuple(ranks))]
    text = json.dumps(table, separators=(",", ":")).encode()
    if len(text) >= SIZE - _WORDS * 8:
        return
    here.table = table
    here.groups[name] = len(table) - 1
    here.memory[_WORDS * 8 : _WORDS * 8 + len(text) + 1] = text + b"\0"


def started(group: Any) -> int:
    """This rank starts an operation in the process group; its number there, from 1."""
    here = _here
    if here is None:
        return 0
    index = here.groups.get(group.group_name, -1)
    if index < 0:
        return 0
    here.words[_STARTED + index] += 1
    here.beat()
    return here.words[_STARTED + index]


@contextmanager
def waiting(group: Any, operation: str, sequence: int | None = None) -> Iterator[None]:
    """This rank waits for the others of the process group; ``sequence`` is what ``started`` gave, or it starts here."""
    began = begin_wait(group, operation, sequence)
    yield
    end_wait(began)


def begin_wait(group: Any, operation: str, sequence: int | None = None) -> int:
    """See ``waiting``; what ``end_wait`` is to be given when the wait is over.

    After an error it is not called: then the position still says what the rank waited in, for whoever asks why.
    """
    here = _here
    if here is None or threading.get_ident() != here.thread:
        return 0
    words = here.words
    if sequence is None:
        sequence = started(group)
    words[OPERATION] = _OPERATION.get(operation, 0)
    words[GROUP] = here.groups.get(group.group_name, -1)
    words[SEQUENCE] = sequence
    words[WAITING] = 1
    here.beat()
    return time.monotonic_ns()


def end_wait(began: int) -> None:
    """The wait that ``begin_wait`` began is over."""
    here = _here
    if began and here is not None:
        here.waited += time.monotonic_ns() - began
        here.words[WAITING] = 0
        here.beat()


def in_phase(name: str) -> None:
    """The phase that runs from now on."""
    here = _here
    if here is not None:
        here.words[PHASE] = _PHASE.get(name, 0)
        here.beat()


def in_micro_batch(number: int) -> None:
    """The micro-batch that runs from now on, from 0."""
    here = _here
    if here is not None:
        here.words[MICRO_BATCH] = number
        here.beat()


def begin_step(step: int) -> None:
    """Step ``step`` (from 1) begins."""
    here = _here
    if here is not None:
        here.words[STEP] = step
        here.words[MICRO_BATCH] = 0
        here.beat()


def finish_step(step: int) -> None:
    """Step ``step`` (from 1) is done."""
    here = _here
    if here is not None:
        now = time.monotonic_ns()
        here.words[OWN] = now - here.began - here.waited
        here.words[FINISHED_AT] = now
        here.words[FINISHED] = step
        here.beat()


def begin_own_time() -> None:
    """What comes from now on, until the next step is done, is this rank's own time."""
    here = _here
    if here is not None:
        here.began, here.waited = time.monotonic_ns(), 0


def holds_state(step: int) -> None:
    """Parameters and optimizer are the state after ``step``; -1: they are being changed."""
    here = _here
    if here is not None:
        here.words[STATE_STEP] = step
