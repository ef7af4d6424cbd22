"""What every rank process does around its work: die with its launcher, report how it ended, leave cleanly.

A launcher cannot go by exit codes alone: now and then a process that has finished aborts while C++ static
destructors run. So a rank writes a small record when it starts and when it ends, and the launcher believes that.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from meshwright.errors import MeshwrightError, TrainingStopped
from meshwright.files import replace_text

LAUNCHER_VARIABLE = "MESHWRIGHT_LAUNCHER"
"""Environment variable: the process id of the launcher whose end must be ours."""
PARENT_VARIABLE = "MESHWRIGHT_PARENT"
"""Environment variable: our parent, where that is not the launcher itself but the spare process it forks ranks from."""
RECORDS_VARIABLE = "MESHWRIGHT_RECORDS"
"""Environment variable: the folder that takes each rank's record."""

HANDED_OVER = 75
"""Exit code of a rank that left because another one failed."""

State = Literal["running", "done", "stopped", "failed"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """How one rank stands. ``done``: finished; ``stopped``: ended early by agreement, state saved."""

    rank: int
    pid: int
    host: str
    state: State
    time: float
    """Seconds since the epoch at which the rank came to this state."""
    exit_code: int = 0
    error: str = ""
    deliberate: bool = False
    """It failed by a decision of ours: another start would end the same."""
    blamed: list[int] = field(default_factory=list)
    """Ranks that it found to hold corrupt state."""
    good_step: int = -1
    """The last step after which none did."""

    @staticmethod
    def path(folder: Path, rank: int) -> Path:
        """Where the record of ``rank`` lies."""
        return folder / f"rank-{rank}.json"

    def write(self, folder: Path) -> None:
        """Replace the rank's record in one step, so that a reader never sees half of one."""
        replace_text(self.path(folder, self.rank), json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankRecord | None:
        """The record of ``rank``; ``None`` if it never wrote one."""
        try:
            return cls(**json.loads(cls.path(folder, rank).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None


def end_with_launcher() -> None:
    """Ask the kernel to kill this process when its launcher dies, however that dies. Linux only.

    Call it first of all, before slow imports. A launcher that died in between is noticed too.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ.get(PARENT_VARIABLE, launcher)):
        os._exit(1)


def run_as_rank(work: Callable[[], object]) -> NoReturn:
    """Run ``work`` as this process's whole task, report the outcome, and leave the process.

    The process leaves by ``os._exit`` after flushing, without C++ static destructors. Its exit code is 0, or an
    error's ``exit_code`` (1: the work failed, 2: the input is wrong). Under our own launcher a rank that
    stopped by agreement exits with 0 too: its record says that it stopped, and that the state is saved.
    """
    end_with_launcher()
    folder = os.environ.get(RECORDS_VARIABLE)
    rank = int(os.environ.get("RANK", "0"))
    if folder is not None and rank != 0:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # one log file a rank, in the order it was written
    # A closed terminal means the same as a request to end.
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))

    def report(state: State, exit_code: int = 0, error: str = "", **more: Any) -> None:
        if folder is not None:
            RankRecord(
                rank=rank,
                pid=os.getpid(),
                host=socket.gethostname(),
                state=state,
                time=time.time(),
                exit_code=exit_code,
                error=error,
                **more,
            ).write(Path(folder))

    exit_code = 0
    report("running")
    try:
        work()
    except TrainingStopped as stop:
        exit_code = 0 if folder is not None else stop.exit_code
        print_line(str(stop))
        _flush()
        report("stopped", stop.exit_code, str(stop))
    except BaseException as error:
        exit_code = _exit_code_of(error)
        if exit_code:
            _show(error)
        _flush()
        said = _describe(error) if exit_code else ""
        report(
            "failed" if exit_code else "done", exit_code, said, deliberate=isinstance(error, MeshwrightError),
            blamed=getattr(error, "blamed", []), good_step=getattr(error, "good_step", -1),
        )  # fmt: skip
    else:
        _flush()
        report("done")
    os._exit(exit_code)


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.exit_code if isinstance(error, MeshwrightError) else 1


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"


def print_line(text: str) -> None:
    """Write ``text`` and the end of its line at once: ranks share the pipe, and ``print`` may write twice."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _show(error: BaseException) -> None:
    """Print the error, and leave it where torchrun looks for the first failure."""
    if isinstance(error, MeshwrightError):
        print_line(str(error))
    else:
        print_line("".join(traceback.format_exception(error)).rstrip())
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
        # The agent may end this process while it writes, and then reads the file: whole or not at all.
        replace_text(Path(path), json.dumps({"message": {"message": _describe(error), "extraInfo": details}}))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # a closed pipe at the other end must not turn a finished rank into a failed one
