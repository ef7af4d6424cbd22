"""A pool of started Gloo ranks that run function after function: a parity test costs milliseconds, not a start."""

from __future__ import annotations

import atexit
import gc
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError

_MOST_LOOPS = 32
"""A pool whose ranks have more transport threads than this is started anew: torch keeps some closed groups."""

_START_SECONDS = 120.0
"""Within which every rank of a pool must have started."""


def last_line(error: Exception) -> str:
    """What an error says in its last line, cut to a line's length: of a rank's traceback, the error itself."""
    return str(error).strip().splitlines()[-1][:300]


class RankFailure(MeshwrightError):
    """A function failed on some rank of a pool; the message holds that rank's traceback."""


def free_port() -> int:
    """A TCP port on loopback that nothing uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RankPool:
    """``size`` processes joined in one Gloo process group, one thread each.

    The processes live until ``close`` (or interpreter exit). A failure or a time-out ends all of
    them, and the next ``run`` starts afresh, so one broken test cannot poison the next.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._crowded = False

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
        """Call a module-level ``function(*arguments)`` on every rank; the results by rank.

        Raises:
            RankFailure: the function raised on some rank, or a rank died, or ``timeout`` seconds passed.
        """
        if not self._processes:
            self._start()
        deadline = time.monotonic() + timeout
        replies: list[Any] = [None] * self.size
        try:
            for connection in self._connections:
                connection.send((function, arguments))
            waiting = set(range(self.size))
            failures: list[tuple[int, str]] = []
            while waiting:
                for rank in sorted(waiting):
                    if not self._connections[rank].poll(0.002) and self._processes[rank].poll() is None:
                        continue
                    succeeded, replies[rank] = self._reply(rank)
                    waiting.discard(rank)
                    if not succeeded:
                        failures.append((rank, replies[rank]))
                        # The others may now wait for this rank for ever: give them a moment, then end all.
                        deadline = min(deadline, time.monotonic() + 3.0)
                if time.monotonic() > deadline:
                    break
            if failures:
                rank, text = failures[0]
                raise RankFailure(f"rank {rank} of {self.size} failed:\n{text}")
            if waiting:
                raise RankFailure(f"ranks {sorted(waiting)} of {self.size} did not finish within {timeout:.0f} s")
        except BaseException:
            self.close()
            raise
        if self._crowded:
            self.close()
        return replies

    def _reply(self, rank: int) -> tuple[bool, Any]:
        """Whether the function succeeded there, and what it returned or how it failed."""
        try:
            if self._connections[rank].poll(0.0):
                succeeded, value, loops = self._connections[rank].recv()
                self._crowded |= loops > _MOST_LOOPS
                return succeeded, value
        except (EOFError, OSError):
            time.sleep(0.1)  # its end of the socket closes a little before it can be asked how it ended
        return False, f"rank {rank} died with exit code {self._processes[rank].poll()}"

    def _start(self) -> None:
        atexit.register(self.close)
        self._crowded = False
        port = free_port()
        with (
            tempfile.TemporaryDirectory(prefix="meshwright-pool-") as folder,
            Listener(os.path.join(folder, "socket"), family="AF_UNIX") as listener,
        ):
            environment = dict(
                os.environ,
                OMP_NUM_THREADS="1",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                WORLD_SIZE=str(self.size),
                GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
                PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
            )
            for rank in range(self.size):
                command = [sys.executable, "-m", "meshwright.prove.pool", str(listener.address)]
                child = subprocess.Popen(command, env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)))
                self._processes.append(child)
            accepted = {}
            for _ in range(self.size):
                self._await_child(listener)
                connection = listener.accept()
                accepted[connection.recv()] = connection
        self._connections = [accepted[rank] for rank in range(self.size)]

    def _await_child(self, listener: Listener) -> None:
        """Until a rank connects.

        Raises:
            RankFailure: one ended before it could.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not wait([listener._listener._socket], timeout=0.2):  # type: ignore[attr-defined]
            ended = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                self.close()
                raise RankFailure(
                    f"rank {ended[0]} of {self.size} ended before it was ready"
                    if ended
                    else f"not all of {self.size} ranks started within {_START_SECONDS:.0f} s"
                )

    def close(self) -> None:
        """End the processes of this pool; a later ``run`` starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self._processes:
            process.wait()
        self._processes, self._connections = [], []


def _transport_loops() -> int:
    """Threads of Gloo's transport in this process: each wakes up over a hundred times a second, also when idle."""
    names = (Path(f"/proc/self/task/{thread}/comm") for thread in os.listdir("/proc/self/task"))
    return sum(name.read_text().startswith("gloo") for name in names if name.exists())


def _end_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: no orphan when the parent is killed


def _serve(arguments: Sequence[str]) -> None:
    from multiprocessing.connection import Client

    _end_with_parent()
    rank = int(os.environ["RANK"])
    with Client(arguments[0], family="AF_UNIX") as connection:
        connection.send(rank)
        import torch

        from meshwright.recovery.loopback import join_here

        torch.set_num_threads(1)
        join_here()
        gc.freeze()  # what is imported stays: a collection looks at what the functions leave behind
        while True:
            try:
                function, parameters = connection.recv()
            except EOFError:
                break
            try:
                outcome = (True, function(*parameters))
            except BaseException:
                outcome = (False, traceback.format_exc())
            gc.collect()  # closed groups live on in reference cycles, and their threads with them
            connection.send((*outcome, _transport_loops()))
    # Static destructors of the transport abort now and then; the work is done, so leave without them.
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1:])
