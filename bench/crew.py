"""The long-lived rank processes of one contestant, driven from the bench's own process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from bench.contestants import Contestant
from bench.messages import Failed, Ready, Stepped
from bench.workload import Workload
from meshwright.prove.pool import free_port
from meshwright.recovery.rank import LAUNCHER_VARIABLE

ROOT = Path(__file__).parents[1]
EXTENSIONS = ROOT / ".venv-bench" / "extensions"
"""Where DeepSpeed compiles its operators: a folder of our own, so that a stale lock in it is surely stale."""


class CrewFailure(Exception):
    """A contestant could not be built, or a step of it failed."""


class Crew:
    """``ranks`` processes that run one contestant. ``steps`` runs some; in between they sleep."""

    def __init__(self, contestant: Contestant, work: Workload, ranks: int, *, threads: int, patience: float) -> None:
        self.contestant, self.work, self.patience = contestant, work, patience
        self.ranks = 1 if contestant.one_rank else ranks
        self.next_step = 0
        self.base_bytes: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._logs = Path(tempfile.mkdtemp(prefix="bench-"))
        self._start(threads)

    def _start(self, threads: int) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "DS_ACCELERATOR": "cpu",
            "DEEPSPEED_LOG_LEVEL": "error",
            "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # ninja is there
            LAUNCHER_VARIABLE: str(os.getpid()),
        }
        with Listener(str(self._logs / "socket"), family="AF_UNIX") as listener:
            for rank in range(self.ranks):
                mine = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with (self._logs / f"rank-{rank}.log").open("wb") as log:
                    command = [sys.executable, "-m", "bench.rank", str(listener.address)]
                    process = subprocess.Popen(command, env=mine, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
                self._processes.append(process)
            # accept() itself has no time limit; a rank that died early must not leave us waiting
            listener._listener._socket.settimeout(self.patience)  # type: ignore[attr-defined]
            accepted: dict[int, Connection] = {}
            try:
                for _ in range(self.ranks):
                    connection = listener.accept()
                    accepted[connection.recv()] = connection
            except OSError:
                raise self._failure("a rank did not come up") from None
        self._connections = [accepted[rank] for rank in range(self.ranks)]
        for reply in self._ask((self.contestant, self.work)):
            assert isinstance(reply, Ready)
            self.base_bytes.append(reply.base_bytes)

    def steps(self, count: int) -> list[Stepped]:
        """Run the next ``count`` steps; what each rank says of them."""
        replies = self._ask((self.next_step, count))
        self.next_step += count
        assert all(isinstance(reply, Stepped) for reply in replies)
        return replies

    def _ask(self, order: object) -> list[Any]:
        for connection in self._connections:
            connection.send(order)
        replies: list[Any] = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(self.patience):
                raise self._failure(f"rank {rank} said nothing for {self.patience:.0f} s")
            try:
                reply = connection.recv()
            except (EOFError, OSError):
                raise self._failure(f"rank {rank} died") from None
            if isinstance(reply, Failed):
                raise self._failure(f"rank {rank} failed:\n{reply.text}")
            replies.append(reply)
        return replies

    def _failure(self, text: str) -> CrewFailure:
        logs = "\n".join(
            f"rank {rank}: {line}" for rank in range(self.ranks) for line in _tail(self._logs / f"rank-{rank}.log")
        )
        self.close()
        return CrewFailure(f"{self.contestant.name}: {text}" + (f"\n{logs}" if logs else ""))

    def close(self) -> None:
        """End the processes, and remove their logs."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes, self._connections = [], []
        shutil.rmtree(self._logs, ignore_errors=True)


def clear_stale_locks() -> None:
    """DeepSpeed's build waits for ever, without a word, for a lock that a killed build left."""
    for lock in EXTENSIONS.glob("**/lock"):
        lock.unlink(missing_ok=True)


def _tail(path: Path) -> Sequence[str]:
    return path.read_text(errors="replace").splitlines()[-15:] if path.exists() else ()
