"""Memory that the launcher owns and its ranks write: it outlives them, and ends with the launcher.

    beat    where the rank is (``comm.position``)
    ask     a pipe on which the rank is asked to hand over its state
    hand    the state it hands over when another rank has failed
    copies  two states that it copies from time to time, in turn

A state is two anonymous files, data and index; the index, written last, says that the data are whole. A rank finds
them as ``/proc/LAUNCHER/fd/N``, so nothing of it has a name on any disk.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.comm.position import SIZE, Position, read

MEMBER_VARIABLE = "MESHWRIGHT_MEMBER"
"""Environment variable: what a rank has of its launcher, as JSON."""
STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of its threads to ``rank-K.stack`` beside its log."""
HAND_OVER = b"h"
"""On the pipe: hand over your state and leave."""


@dataclass(frozen=True)
class StateFiles:
    """One place for a state: descriptors of the launcher."""

    data: int
    index: int


@dataclass(frozen=True)
class Member:
    """What one rank has of its launcher. Descriptors are the launcher's."""

    launcher: int
    rank: int
    generation: int
    beat: int
    store: int
    """Where rank 0 says the port of its store: its ``beat``."""
    port: int
    """That rank 0 shall use; 0: any."""
    ask: int
    hand: StateFiles
    copies: tuple[StateFiles, StateFiles]

    def path(self, descriptor: int) -> Path:
        """Where a process of the same user opens a descriptor of the launcher."""
        return Path(f"/proc/{self.launcher}/fd/{descriptor}")

    def to_json(self) -> str:
        """For ``MEMBER_VARIABLE``."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> Member | None:
        """What the launcher gave this rank; None: no launcher of ours started it."""
        text = (os.environ if environment is None else environment).get(MEMBER_VARIABLE)
        if text is None:
            return None
        values: dict[str, Any] = json.loads(text)
        values["hand"] = StateFiles(**values["hand"])
        first, second = (StateFiles(**one) for one in values["copies"])
        return Member(**{**values, "copies": (first, second)})


class RankMemory:
    """The launcher's side of one rank's memory; used again by the rank's successors."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._beat = _memory(f"meshwright-beat-{rank}")
        os.ftruncate(self._beat, SIZE)
        self._map = mmap.mmap(self._beat, SIZE)
        self._ask_read, self._ask_write = os.pipe()
        os.set_blocking(self._ask_write, False)
        self.hand, first, second = (
            StateFiles(_memory(f"meshwright-state-{rank}"), _memory(f"meshwright-index-{rank}")) for _ in range(3)
        )
        self.copies = (first, second)

    @property
    def beat(self) -> int:
        """Descriptor of the position."""
        return self._beat

    def renew(self) -> None:
        """Forget where the last rank was, and what it was asked."""
        self._map[:] = bytes(SIZE)
        os.close(self._ask_read)
        os.close(self._ask_write)
        self._ask_read, self._ask_write = os.pipe()
        os.set_blocking(self._ask_write, False)

    def member(self, generation: int, store: int, port: int) -> Member:
        """What the rank's process gets."""
        return Member(
            launcher=os.getpid(), rank=self.rank, generation=generation, beat=self._beat, store=store, port=port,
            ask=self._ask_read, hand=self.hand, copies=self.copies,
        )  # fmt: skip

    def position(self) -> Position:
        """Where the rank is, or was when it ended."""
        return read(self._map)

    def ask(self, what: bytes) -> None:
        """Ask the rank for something."""
        try:
            os.write(self._ask_write, what)
        except (BlockingIOError, BrokenPipeError):
            return  # asked often enough

    def forget_states(self) -> None:
        """What it handed over or copied is not to be used any more."""
        for files in (self.hand, *self.copies):
            _empty(files)

    def forget_handed(self) -> None:
        """What it handed over has been taken; its memory is free again."""
        _empty(self.hand)

    def close(self) -> None:
        """Give everything back."""
        self._map.close()
        for files in (self.hand, *self.copies):
            os.close(files.data)
            os.close(files.index)
        for descriptor in (self._beat, self._ask_read, self._ask_write):
            os.close(descriptor)


def _empty(files: StateFiles) -> None:
    os.ftruncate(files.index, 0)
    os.ftruncate(files.data, 0)


def _memory(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)
