"""Messages between ranks of one host through memory they share: one copy in, read in place, no thread in between.

Every rank of a group owns an arena that the others map. Operation ``k`` of the group is the ``k``-th that each of
its ranks starts; all start the same ones in the same order.

    arena of rank r   | published | consumed | head of op k: where each peer's message lies ... | messages .......... |
                        ^ waited on by readers (futex)      ^ ring of ``_HEADS`` operations       ^ reused once consumed

A writer copies its messages in, writes their places into the head, raises ``published`` and wakes whoever sleeps on
it. A reader waits until ``published`` passes ``k``, reads, and raises its own ``consumed`` when all it took from
operation ``k`` and those before it is no longer needed; what every peer has consumed is free again.

Gloo moves the same message through two kernel buffers and two more threads, which on busy cores cost more than the
copies. Arenas are anonymous files: they have no name, so a killed rank leaves nothing behind. Only on x86-64, whose
stores become visible in the order they were made.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

_ARENA_BYTES = 16 * 2**30
"""Address space, not memory: pages are taken when they are first written."""
_HEADS = 4096
"""Operations whose heads are kept; so many at most may be under way."""
_ALIGNMENT = 64
_SPIN_SECONDS = 100e-6
"""Before a reader sleeps, where every rank has a core: waking a sleeper takes about as long."""
_SLEEP_SECONDS = 1
"""After which a sleeper looks whether the rank it waits for is still there."""
_PUBLISHED, _CONSUMED, _FIRST_HEAD = 0, 1, 2
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1


class PeerLost(RuntimeError):
    """A rank ended, or did not come within the group's time-out, while another waited for its message."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_A_WHILE = _TimeSpec(_SLEEP_SECONDS, 0)


class _Arena:
    """One rank's memory, mapped here. ``control`` is int64; ``data`` bytes."""

    def __init__(self, file: int, ranks: int) -> None:
        self._map = mmap.mmap(file, _ARENA_BYTES)
        words = _FIRST_HEAD + _HEADS * ranks * 2
        self.control: NDArray[np.int64] = np.frombuffer(self._map, np.int64, words)
        self.heads = self.control[_FIRST_HEAD:].reshape(_HEADS, ranks, 2)
        start = -(-words * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, _ARENA_BYTES - start, start)
        self.address = self.control.ctypes.data


class Channel:
    """This rank's end of the memory that all ranks of one group share."""

    def __init__(self, rank: int, arenas: list[_Arena], processes: list[int], timeout: float, spin: bool) -> None:
        self.rank, self.size = rank, len(arenas)
        self._arenas, self._processes, self._timeout = arenas, processes, timeout
        self._spin = _SPIN_SECONDS if spin else 0.0
        self._mine = arenas[rank]
        self._next = 0
        self._under_way: deque[tuple[int, list[tuple[int, int]]]] = deque()
        """Operations that hold memory of my arena, oldest first, with (start, stop) of their messages."""
        self._finished: set[int] = set()
        self._consumed = 0

    def send(self, messages: Sequence[Tensor]) -> int:
        """Start an operation: ``messages[r]`` (flat, contiguous) is for rank r, the own one is left out; its number."""
        return self.send_to({peer: message for peer, message in enumerate(messages) if peer != self.rank})

    def send_to(self, messages: Mapping[int, Tensor]) -> int:
        """The same for some of the ranks; the others must not read any."""
        number = self._next
        self._next += 1
        self._reclaim()
        if len(self._under_way) >= _HEADS - 1:
            raise RuntimeError(f"more than {_HEADS - 1} exchanges are under way; wait for some")
        head = self._mine.heads[number % _HEADS]
        written: dict[tuple[int, int], int] = {}
        self._under_way.append((number, []))
        for peer, message in messages.items():
            nbytes = message.numel() * message.element_size()
            key = (message.data_ptr(), nbytes)
            if key not in written:
                written[key] = self._write(message, nbytes)
            head[peer] = written[key], nbytes
        self._mine.control[_PUBLISHED] = number + 1
        _libc.syscall(_FUTEX, ctypes.c_void_p(self._mine.address), _FUTEX_WAKE, 1 << 30, None, None, 0)
        return number

    def _write(self, message: Tensor, nbytes: int) -> int:
        start = self._free_place(nbytes)
        if start + nbytes > self._mine.data.size:
            raise RuntimeError(f"{start + nbytes:,} bytes of messages are under way, more than an arena holds")
        if nbytes:
            self._mine.data[start : start + nbytes] = _bytes_of(message)
            self._under_way[-1][1].append((start, -(-(start + nbytes) // _ALIGNMENT) * _ALIGNMENT))
        return start

    def _free_place(self, nbytes: int) -> int:
        """The lowest gap that is large enough: pages used before are used again."""
        start = 0
        for begin, end in sorted(place for _, places in self._under_way for place in places):
            if start + nbytes <= begin:
                break
            start = max(start, end)
        return start

    def _reclaim(self) -> None:
        """Forget the operations that all peers are done with."""
        done = min(int(arena.control[_CONSUMED]) for rank, arena in enumerate(self._arenas) if rank != self.rank)
        while self._under_way and self._under_way[0][0] < done:
            self._under_way.popleft()

    def wait(self, number: int, peers: Iterable[int] | None = None) -> None:
        """Return once the messages of operation ``number`` are there: of these ``peers``, or of every one.

        Raises:
            PeerLost: a peer ended, or the time-out passed.
        """
        for rank in range(self.size) if peers is None else peers:
            arena = self._arenas[rank]
            if rank != self.rank and arena.control[_PUBLISHED] <= number:
                self._wait_for(rank, arena, number)

    def _wait_for(self, rank: int, arena: _Arena, number: int) -> None:
        began = time.monotonic()
        while time.monotonic() - began < self._spin:
            if arena.control[_PUBLISHED] > number:
                return
        while True:
            seen = int(arena.control[_PUBLISHED])
            if seen > number:
                return
            outcome = _libc.syscall(
                _FUTEX, ctypes.c_void_p(arena.address), _FUTEX_WAIT, ctypes.c_uint32(seen & 0xFFFFFFFF),
                ctypes.byref(_A_WHILE), None, 0,
            )  # fmt: skip
            if outcome and ctypes.get_errno() == errno.ETIMEDOUT:
                self._look_for(rank, arena, number, time.monotonic() - began)

    def _look_for(self, rank: int, arena: _Arena, number: int, waited: float) -> None:
        gone = _has_ended(self._processes[rank])
        if arena.control[_PUBLISHED] <= number and (gone or waited > self._timeout):
            what = "has ended" if gone else f"sent nothing for {waited:.0f} s"
            raise PeerLost(f"process {self._processes[rank]}, rank {rank} of its group of {self.size}, {what}")

    def message(self, number: int, peer: int, dtype: torch.dtype) -> Tensor:
        """What rank ``peer`` sent me in operation ``number``, in place: valid until ``release``."""
        arena = self._arenas[peer]
        start, nbytes = (int(value) for value in arena.heads[number % _HEADS, self.rank])
        return torch.from_numpy(arena.data[start : start + nbytes]).view(dtype)

    def release(self, number: int) -> None:
        """Say that the messages of operation ``number`` are no longer read here."""
        self._finished.add(number)
        while self._consumed in self._finished:
            self._finished.discard(self._consumed)
            self._consumed += 1
        self._mine.control[_CONSUMED] = self._consumed


def _has_ended(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as status:
            return status.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


class Coming:
    """The messages of an operation under way, as something to wait for; they stay where they are."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self._number = channel, number

    def wait(self) -> None:
        """Return when all are there."""
        self._channel.wait(self._number)


class Arrival:
    """An operation under way, as something to wait for; ``receives[r]`` takes rank r's message, if it has elements."""

    def __init__(self, channel: Channel, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        self._channel, self._receives = channel, receives
        self._number = channel.send(sends)

    def wait(self) -> None:
        """Return when all messages are in their places."""
        channel = self._channel
        channel.wait(self._number)
        for peer, place in enumerate(self._receives):
            if peer != channel.rank and place.numel():
                message = channel.message(self._number, peer, torch.uint8)
                _bytes_of(place)[:] = message.numpy()
        channel.release(self._number)


def copy_bytes(place: Tensor, message: Tensor) -> None:
    """Copy a message's bytes into flat contiguous ``place``."""
    _bytes_of(place)[:] = message.numpy()


def _bytes_of(tensor: Tensor) -> NDArray[Any]:
    """A flat contiguous tensor's bytes. NumPy's copies are no operations to whoever records those of torch."""
    place = (ctypes.c_uint8 * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(place), np.uint8)


_channels: dict[str, Channel] = {}
"""By name of the process group."""


def channel_of(group: dist.ProcessGroup) -> Channel | None:
    """The memory that the ranks of ``group`` share, if it was opened and they do."""
    return _channels.get(group.group_name) if _channels else None


def open_channel(
    group: dist.ProcessGroup, gather: Callable[[object, dist.ProcessGroup], list[Any]], timeout: timedelta | None = None
) -> None:
    """Share memory between the ranks of ``group`` where all are on one host; every rank must call it.

    Nothing is shared, on any rank, if some rank cannot: another host or kind of machine, a process that may not be
    looked into, an unusual transport.

    Args:
        group: its backend and members.
        gather: gives every rank's value to every rank (``comm.collectives.all_gather_json``).
        timeout: how long a rank waits for a message; absent: as long as torch's groups do.
    """
    rank = group.rank()
    file = _anonymous_file() if _possible(group) else -1
    said = gather({"host": _host(), "process": os.getpid(), "file": file}, group)
    arenas = _arenas(said)
    together = all(gather(arenas is not None, group))
    if file >= 0:
        os.close(file)
    if together and arenas is not None:
        seconds = (timeout or dist.constants.default_pg_timeout).total_seconds()
        cores = len(os.sched_getaffinity(0))
        spin = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))) <= cores
        _channels[group.group_name] = Channel(rank, arenas, [one["process"] for one in said], seconds, spin)


def close_channel(group: dist.ProcessGroup) -> None:
    """Let go of the memory shared in ``group``, if any."""
    _channels.pop(group.group_name, None)


def _possible(group: dist.ProcessGroup) -> bool:
    return platform.system() == "Linux" and platform.machine() == "x86_64" and dist.get_backend(group) == "gloo"


def _anonymous_file() -> int:
    """An open file of the arena's size without a name; -1 where the system gives none."""
    try:
        file = os.memfd_create("meshwright-arena")
    except OSError:
        return -1
    try:
        os.ftruncate(file, _ARENA_BYTES)
    except OSError:
        os.close(file)
        return -1
    return file


def _host() -> str:
    """The same on processes of one host: one boot of a kernel, one namespace of processes, one of network links."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            spaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
            return " ".join([boot.read().strip(), *map(str, spaces)])
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"


def _arenas(said: list[dict[str, Any]]) -> list[_Arena] | None:
    """Every rank's arena, mapped; None if one of them cannot be."""
    if any(one["file"] < 0 or one["host"] != said[0]["host"] for one in said):
        return None
    arenas = []
    for one in said:
        try:
            file = os.open(f"/proc/{one['process']}/fd/{one['file']}", os.O_RDWR)
        except OSError:
            return None
        try:
            arenas.append(_Arena(file, len(said)))
        except (OSError, ValueError):
            return None
        finally:
            os.close(file)
    return arenas
