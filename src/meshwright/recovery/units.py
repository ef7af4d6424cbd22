"""One isolating unit a rank: a process that ends without touching the others.

``ColdUnits`` starts an interpreter a rank; ``WarmUnits`` has one process with everything loaded, from which ranks are
forked in milliseconds. Both say as soon as a rank has ended, and with what. Why not an elastic agent a rank:
docs/decisions/0009.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshwright.recovery.rank import LAUNCHER_VARIABLE


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a rank is started with."""

    rank: int
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    """Takes its standard error; its standard output is ours (``run_as_rank`` joins the two on all ranks but 0)."""


class Units(Protocol):
    """Processes of the ranks of one generation after another."""

    def start(self, starts: Sequence[Start]) -> None:
        """Start these ranks; none of the same number may be alive."""

    def processes(self) -> dict[int, int]:
        """Process of each rank that has not ended."""

    def ended(self) -> dict[int, int]:
        """Ranks that ended since the last call, with their exit code (below 0: the signal)."""

    def signal(self, rank: int, number: int) -> None:
        """Send a signal; nothing happens when the rank has ended."""

    def close(self) -> None:
        """End everything."""


class ColdUnits:
    """``python -u -m MODULE ARGUMENTS`` for each rank."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._module, self._environment = module, dict(environment)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, starts: Sequence[Start]) -> None:
        """See :class:`Units`."""
        for one in starts:
            environment = {
                **os.environ, **self._environment, **one.environment, LAUNCHER_VARIABLE: str(os.getpid())
            }  # fmt: skip
            with one.log.open("ab") as log:
                self._running[one.rank] = subprocess.Popen(
                    [sys.executable, "-u", "-m", self._module, *one.arguments],
                    env=environment, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True,
                )  # fmt: skip

    def processes(self) -> dict[int, int]:
        """See :class:`Units`."""
        return {rank: process.pid for rank, process in self._running.items()}

    def ended(self) -> dict[int, int]:
        """See :class:`Units`."""
        codes = {rank: process.poll() for rank, process in self._running.items()}
        found = {rank: code for rank, code in codes.items() if code is not None}
        for rank in found:
            del self._running[rank]
        return found

    def signal(self, rank: int, number: int) -> None:
        """See :class:`Units`."""
        if rank in self._running:
            self._running[rank].send_signal(number)

    def close(self) -> None:
        """See :class:`Units`."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        self._running.clear()


class WarmUnits:
    """Ranks forked from a spare process that has the module loaded; see ``recovery.zygote``."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._module, self._environment = module, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pending = b""
        self._starting: set[int] = set()
        self._alive: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._heat()

    def _heat(self) -> None:
        ours, theirs = socket.socketpair()
        self._pending = b""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "meshwright.recovery.zygote", str(theirs.fileno()), self._module],
                env={**os.environ, **self._environment, LAUNCHER_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        ours.setblocking(False)
        self._socket = ours

    def _cool(self) -> None:
        """The spare itself has ended, and with it all ranks."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None
        for rank in [*self._alive, *self._starting]:
            self._ended[rank] = -signal.SIGKILL
        self._alive, self._starting = {}, set()

    def start(self, starts: Sequence[Start]) -> None:
        """See :class:`Units`."""
        if self._process is None or self._process.poll() is not None:
            self._cool()
            self._ended = {}
            self._heat()
        for one in starts:
            self._starting.add(one.rank)
            self._order(
                rank=one.rank, arguments=list(one.arguments), environment=dict(one.environment), log=str(one.log)
            )

    def _order(self, **order: Any) -> None:
        if self._socket is None:
            return
        data = json.dumps(order).encode() + b"\n"
        deadline = time.monotonic() + 10
        while data and time.monotonic() < deadline:  # its socket holds far more than it is ever sent
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                return self._cool()

    def _listen(self) -> None:
        if self._socket is None:
            return
        while True:
            try:
                received = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            if not received:
                return self._cool()
            *lines, self._pending = (self._pending + received).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: Mapping[str, Any]) -> None:
        if "started" in message:
            self._starting.discard(message["rank"])
            self._alive[message["rank"]] = message["started"]
        elif "ended" in message:
            for rank in [rank for rank, pid in self._alive.items() if pid == message["ended"]]:
                del self._alive[rank]
                self._ended[rank] = message["code"]

    def processes(self) -> dict[int, int]:
        """See :class:`Units`."""
        self._listen()
        return dict(self._alive)

    def ended(self) -> dict[int, int]:
        """See :class:`Units`."""
        self._listen()
        found, self._ended = self._ended, {}
        return found

    def signal(self, rank: int, number: int) -> None:
        """See :class:`Units`."""
        if rank in self._alive:
            self._order(pid=self._alive[rank], signal=number)

    def close(self) -> None:
        """See :class:`Units`."""
        self._listen()
        for pid in self._alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cool()
        self._ended = {}
