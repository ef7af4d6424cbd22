"""One run at a time in a run directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType

from meshwright.errors import InputError

LOCK = "lock"


class RunLock:
    """Holds a run directory; the kernel lets go of it when this process ends, however it ends.

    Args:
        run_directory: that of the run.
        what: the option or verb that asks for it, for messages.
        instead: what else can be done than to wait, for messages.

    Raises:
        InputError: another process holds it.
    """

    def __init__(
        self, run_directory: Path, what: str = "--out", instead: str = "end it, or give another --out"
    ) -> None:
        self._file = -1
        path = run_directory / LOCK
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(
                f"{what}: {run_directory} cannot be used ({error.strerror}); give a directory you may write"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            said = os.read(file, 4096).decode(errors="replace")
            os.close(file)
            raise InputError(
                f"{what}: {run_directory} is in use by {_who(said)}; wait for it, {instead}"
            ) from None
        text = json.dumps({"host": socket.gethostname(), "process": os.getpid()}) + "\n"
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)
        self._file = file

    def release(self) -> None:
        """Let go of it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _who(text: str) -> str:
    try:
        said = json.loads(text)
        return f"process {said['process']} on {said['host']}"
    except (ValueError, KeyError, TypeError):
        return "another run"
