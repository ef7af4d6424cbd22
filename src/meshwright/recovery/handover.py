"""A rank's side of recovery: it says where it is, and gives its state away when another rank has failed.

A thread of its own waits for the launcher's word, so that a rank which hangs in a collective still answers. The state
is whole between two updates: the thread takes the lock that the update holds.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.placed import DTYPE_NAMES, PlacedTensor
from meshwright.checkpoint.save import pieces_of
from meshwright.checkpoint.tensor_file import write_file
from meshwright.comm import position
from meshwright.recovery.loopback import loopback_store
from meshwright.recovery.rank import HANDED_OVER
from meshwright.recovery.shared import HAND_OVER, STACK_SIGNAL, Member, StateFiles


@dataclass(frozen=True)
class State:
    """What a rank holds after ``step``."""

    step: int
    tensors: Sequence[PlacedTensor]
    counted: Sequence[bool]
    """Whether this rank is the one that speaks for the tensor."""
    elements: int
    """Of the whole model: what all ranks together must hold for each role."""
    header: Mapping[str, Any]
    """Layout, model, optimizer and state of the checkpoint it will be."""


class Here:
    """This rank as its launcher sees it."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._turn = 0
        self._offered: tuple[threading.Lock, Callable[[], State]] | None = None
        with member.path(member.beat).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), position.SIZE)
        position.attach(self._memory, os.getpid())
        position.in_phase("setup")
        self._ask = os.open(member.path(member.ask), os.O_RDONLY)
        threading.Thread(target=self._listen, name="recovery", daemon=True).start()

    def write_stacks_to(self, path: Path) -> None:
        """On ``STACK_SIGNAL``, write the stacks of all threads there."""
        self._stacks = path.open("w", encoding="utf-8")
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)

    def store(self, world_size: int, timeout: Any) -> TCPStore:
        """The store by which the ranks of this generation find each other: rank 0's, on loopback, at a port of its own.

        Each generation has a new one, so it holds no key of an earlier one.
        """
        member = self.member
        if member.rank == 0:
            made = loopback_store(member.port, world_size, timeout, first=True)
            port = int(made.port)
            position.write_port(self._memory, port)
            os.environ["MASTER_PORT"] = str(port)
            return made
        with member.path(member.store).open("r+b") as file, mmap.mmap(file.fileno(), position.SIZE) as first:
            deadline = time.monotonic() + float(timeout.total_seconds())
            while not (port := position.read(first).port):
                if time.monotonic() > deadline:
                    raise TimeoutError("rank 0 has not opened its store")
                time.sleep(0.005)
        os.environ["MASTER_PORT"] = str(port)
        return loopback_store(port, world_size, timeout, first=False)

    def offer(self, lock: threading.Lock, state: Callable[[], State]) -> None:
        """From now on ``state()``, taken while ``lock`` is held, can be handed over."""
        self._offered = lock, state

    def copy(self, state: State) -> None:
        """Copy the counted part of the state to where it outlives this process."""
        self._turn = 1 - self._turn
        _write(self.member, self.member.copies[self._turn], state, f"copy{self._turn}", counted_only=True)

    def _listen(self) -> None:
        while True:
            asked = os.read(self._ask, 1)
            if not asked:
                os._exit(1)  # the launcher is gone
            if asked == HAND_OVER:
                self._hand_over()

    def _hand_over(self) -> None:
        if self._offered is not None:
            lock, state = self._offered
            with lock:
                try:
                    _write(self.member, self.member.hand, state(), "hand", counted_only=False)
                finally:  # what cannot be written is not there; the launcher takes another state
                    os._exit(HANDED_OVER)
        os._exit(HANDED_OVER)


def await_the_launcher(seconds: float) -> None:
    """Another rank is lost: stay, so that the launcher can ask for the state of this one."""
    time.sleep(seconds)


class _Memory(Disk):
    """Writes into an open anonymous file instead of a new one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, path: Path) -> BinaryIO:
        """See :class:`Disk`."""
        return self._path.open("r+b", buffering=0)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """See :class:`Disk`."""
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]

    def sync_file(self, file: BinaryIO) -> None:
        """Memory has no medium; what an earlier, longer state left is cut off."""
        file.truncate()


def _write(member: Member, files: StateFiles, state: State, kind: str, *, counted_only: bool) -> None:
    index = member.path(files.index)
    with index.open("r+b") as file:
        file.truncate(0)
    chosen = [
        (tensor, counted)
        for tensor, counted in zip(state.tensors, state.counted, strict=True)
        if counted or not counted_only
    ]
    pieces = pieces_of([tensor for tensor, _ in chosen])
    counted = {id(tensor): flag for tensor, flag in chosen}
    name = Path(f"rank-{member.rank:05d}-{kind}.safetensors")
    entry, slices = write_file(name, pieces, _Memory(member.path(files.data)))
    described = [
        [p.source.key, DTYPE_NAMES[p.source.tensor.dtype], p.source.global_shape, counted[id(p.source)], vars(s)]
        for p, s in zip(pieces, slices, strict=True)
    ]
    content = {
        "generation": member.generation, "step": state.step, "elements": state.elements,
        "header": state.header, "file": name.name,
        "entry": vars(entry), "pieces": described,
    }  # fmt: skip
    with index.open("r+b") as file:
        file.write(json.dumps(content, separators=(",", ":")).encode())
