"""The few things a checkpoint asks of a file system; tests stand in for it to fail at any of them."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO


class Disk:
    """A local (or mounted) file system with atomic rename."""

    def make_folder(self, path: Path) -> None:
        """Make a new folder and its parents; the folder itself must not exist."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing."""
        return path.open("xb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append to an open file."""
        file.write(data)

    def sync_file(self, file: BinaryIO) -> None:
        """Return when all that was written stands on the medium."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Return when the names in the folder stand on the medium."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move a folder to a name that does not exist, at once or not at all."""
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        os.link(source, target)

    def free_bytes(self, path: Path) -> int:
        """What can still be written under a folder that exists."""
        return shutil.disk_usage(path).free

    def remove(self, path: Path) -> None:
        """Remove a folder with all in it."""
        shutil.rmtree(path)


def forget(path: Path, disk: Disk) -> None:
    """Remove a folder if it can be; what stays behind is no checkpoint and does no harm."""
    with contextlib.suppress(OSError):
        disk.remove(path)
