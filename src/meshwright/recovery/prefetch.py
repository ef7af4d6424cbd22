"""Keeps the newest checkpoint in the host's memory, so that ranks which start again do not wait for the disk."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from meshwright.checkpoint.folder import CHECKPOINTS, step_of
from meshwright.checkpoint.manifest import MANIFEST

_EVERY = 2.0
"""Seconds between two looks at the folder."""


class Prefetch:
    """Asks the kernel to read each new checkpoint of a run ahead; it decides whether there is room."""

    def __init__(self, run_directory: Path) -> None:
        self._folder = run_directory / CHECKPOINTS
        self._next = 0.0
        self.newest: Path | None = None
        """The one that was asked for last."""

    def look(self) -> None:
        """Ask for the newest checkpoint, if there is a new one."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        found = [path for path in self._folder.glob("step-*") if (path / MANIFEST).exists()]
        newest = max(found, key=step_of, default=None)
        if newest is None or newest == self.newest:
            return
        self.newest = newest
        for path in newest.iterdir():
            with contextlib.suppress(OSError):  # it may be gone already
                file = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(file)
