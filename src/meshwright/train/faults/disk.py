"""A disk that fails when a fault says so: no space, an I/O error, a write that does not return."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from meshwright.checkpoint.disk import Disk
from meshwright.job.fault_section import Fault

ERRORS = {"disk-full": errno.ENOSPC, "io-error": errno.EIO}


class FaultyDisk(Disk):
    """Hands on to ``disk``, and asks at each step of a save what is to happen.

    Args:
        disk: the real one.
        at: told the checkpoint's step and the phase; ends or delays this rank if a fault says so.
    """

    def __init__(self, disk: Disk, at: Callable[[int, str], None]) -> None:
        self._disk, self._at = disk, at
        self._step = 0
        self._broken: tuple[str, int] | None = None
        """Phase and error number of what fails in this save."""

    def begin(self, step: int) -> None:
        """The checkpoint of ``step`` is begun: what was broken in the last is whole again."""
        self._step, self._broken = step, None

    def fail(self, fault: Fault) -> None:
        """From now on, and in this save, the phase of ``fault`` fails as it says."""
        self._broken = fault.phase, ERRORS[fault.kind]

    def hang(self, seconds: float) -> None:
        """Stand still in the operation under way."""
        time.sleep(seconds)

    def _meet(self, phase: str, path: str) -> None:
        self._at(self._step, phase)
        if self._broken is not None and self._broken[0] == phase:
            number = self._broken[1]
            raise OSError(number, os.strerror(number), path)

    def make_folder(self, path: Path) -> None:
        """See :class:`Disk`."""
        self._disk.make_folder(path)

    def create(self, path: Path) -> BinaryIO:
        """See :class:`Disk`."""
        return self._disk.create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """See :class:`Disk`."""
        try:
            self._meet("save", file.name)
        except OSError:
            self._disk.write(file, data[: len(data) // 2])  # as far as there was room
            raise
        self._disk.write(file, data)

    def sync_file(self, file: BinaryIO) -> None:
        """See :class:`Disk`."""
        self._meet("sync", file.name)
        self._disk.sync_file(file)

    def sync_folder(self, path: Path) -> None:
        """See :class:`Disk`."""
        self._disk.sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        """See :class:`Disk`."""
        if ".tmp-" in source.name:
            self._meet("commit", str(source))
        self._disk.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """See :class:`Disk`."""
        self._disk.link(source, target)

    def free_bytes(self, path: Path) -> int:
        """See :class:`Disk`."""
        return self._disk.free_bytes(path)

    def remove(self, path: Path) -> None:
        """See :class:`Disk`."""
        self._disk.remove(path)
