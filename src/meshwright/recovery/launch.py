"""Start the ranks of this machine through torch elastic, pass signals on, and say in one block why they ended."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, MeshwrightError, TrainingStopped
from meshwright.recovery.rank import LAUNCHER_VARIABLE, RECORDS_VARIABLE, RankRecord

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import LogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

WORKER = "meshwright.train.worker"
LOOPBACK = "127.0.0.1"

_LINES_SHOWN = 12
# What the other ranks say when one they were talking to is gone: a consequence, not the cause.
_PEER_LOST = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "timed out", "remote process")


class RanksFailed(MeshwrightError):
    """Some rank failed; the message is one block about the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One start of local ranks.

    Attributes:
        run_directory: passed to the module as its first argument; ``logs/`` in it takes the rank logs.
        ranks: processes to start.
        module: run as ``python -m module run_directory *arguments`` in every rank.
        port: of the rendezvous on loopback; ``None`` takes a free one.
        grace_seconds: how long ranks may take to save and stop after a signal before they are killed.
        environment: further variables for the ranks.
    """

    run_directory: Path
    ranks: int
    module: str = WORKER
    arguments: Sequence[str] = ()
    port: int | None = None
    grace_seconds: int = 60
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Start the ranks and wait for them. Rank 0 has our standard output; everything else goes to the logs.

        A first SIGINT, SIGTERM or SIGHUP is passed on, and the ranks have ``grace_seconds`` to save and stop;
        a second one kills them. No rank outlives this call, nor this process, however it ends.

        Raises:
            InputError: the port is taken, or a rank refused the job.
            TrainingStopped: the ranks stopped by agreement, or on a signal.
            RanksFailed: a rank failed.
        """
        check_port(self.port)
        logs = self._new_log_folder()
        failures: dict[int, Any] = {}
        stopped_by: signal.Signals | None = None
        # Slow to import, and a machine that only plans need not.
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        command = ("-u", "-m", self.module, str(self.run_directory), *self.arguments)
        with _environment(self._variables(logs)), _quiet_elastic(), _relayed_signals(logs, self.ranks):
            try:
                elastic_launch(self._config(logs), sys.executable)(*command)
            except ChildFailedError as error:
                failures = dict(error.failures)
            except SignalException as error:
                stopped_by = error.sigval
            finally:
                _kill_remaining(logs, self.ranks)
        endings = [_Ending.of(rank, logs, failures.get(rank)) for rank in range(self.ranks)]
        self._judge(endings, stopped_by)

    def _judge(self, endings: Sequence[_Ending], stopped_by: signal.Signals | None) -> None:
        failed = sorted((ending for ending in endings if ending.failed(stopped_by)), key=lambda e: e.blame)
        if failed and failed[0].refusal:
            raise InputError(failed[0].error)
        if failed:
            raise RanksFailed(failure_block(failed, self.ranks))
        stopped = [ending for ending in endings if ending.state == "stopped"]
        if stopped:
            raise TrainingStopped(stopped[0].error)
        if stopped_by is not None:
            unsaved = [str(ending.rank) for ending in endings if ending.state != "done"]
            if unsaved:
                raise TrainingStopped(
                    f"stopped by {stopped_by.name}; rank {', '.join(unsaved)} of {self.ranks} ended without saving, "
                    f"before training had begun or {self.grace_seconds} s after the signal"
                )

    def _new_log_folder(self) -> Path:
        """``logs/attempt-N`` with the next free N: a resumed run keeps the logs of those before it."""
        root = self.run_directory / "logs"
        taken = [int(path.name.removeprefix("attempt-")) for path in root.glob("attempt-[0-9]*")]
        folder = root / f"attempt-{max(taken, default=0) + 1}"
        folder.mkdir(parents=True)
        return folder.absolute()

    def _variables(self, logs: Path) -> dict[str, str]:
        defaults = {
            "OMP_NUM_THREADS": str(threads_per_rank(self.ranks)),
            "GLOO_SOCKET_IFNAME": "lo",
            # Large buffers come and go every micro-batch: huge pages save most of their page faults.
            "THP_MEM_ALLOC_ENABLE": "1",
        }
        mine = {LAUNCHER_VARIABLE: str(os.getpid()), RECORDS_VARIABLE: str(logs)}
        return {name: os.environ.get(name, value) for name, value in defaults.items()} | mine | dict(self.environment)

    def _config(self, logs: Path) -> LaunchConfig:
        from torch.distributed.launcher.api import LaunchConfig

        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.ranks,
            run_id=f"meshwright-{os.getpid()}",
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{LOOPBACK}:{self.port or 0}",
            rdzv_configs={"timeout": 60},
            local_addr=LOOPBACK,
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=_logs_specs(logs, self.ranks),
            signals_to_handle="SIGQUIT",  # the others are ours, see `_relayed_signals`
            shutdown_timeout=self.grace_seconds,
        )


def launch(run_directory: Path, ranks: int, arguments: Sequence[str] = (), *, port: int | None = None) -> None:
    """Train ``run_directory``'s job on ``ranks`` processes of this machine; see ``Launch.run``."""
    Launch(run_directory=run_directory, ranks=ranks, arguments=arguments, port=port).run()


def threads_per_rank(ranks: int) -> int:
    """Computing threads for each of ``ranks`` processes: the cores we may use, shared out, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def check_port(port: int | None) -> None:
    """Refuse a rendezvous port that cannot be had.

    Raises:
        InputError: it is out of range or something listens on it.
    """
    if port is None:
        return
    if not 0 < port < 65536:
        raise InputError(f"port {port} is out of range; legal are 1 to 65535, or none for a free one")
    with socket.socket() as probe:
        # As the server itself will: a port that only lingers in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise InputError(
                f"port {port} on {LOOPBACK} cannot be used ({error.strerror}); give another, or none for a free one"
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ending:
    """How one rank ended, from its own record and from what the agent saw."""

    rank: int
    state: str
    exit_code: int | None
    """What the process returned; ``None`` if the agent saw no failure of it."""
    error: str
    time: float
    refusal: bool
    log: Path

    @classmethod
    def of(cls, rank: int, logs: Path, failure: Any) -> _Ending:
        record = RankRecord.read(logs, rank)
        return cls(
            rank=rank,
            state="silent" if record is None else record.state,
            exit_code=None if failure is None else int(failure.exitcode),
            error="" if record is None else record.error,
            time=record.time if record is not None and record.state == "failed" else _seen_at(failure),
            refusal=record is not None and record.state == "failed" and record.exit_code == InputError.exit_code,
            log=logs / f"rank-{rank}.log",
        )

    def failed(self, stopped_by: signal.Signals | None) -> bool:
        if self.state in ("done", "stopped"):
            return False  # an abort on the way out, after the work was done and reported
        if self.state == "failed":
            return True
        # Without a signal, a rank that left before reporting has failed, with whatever exit code.
        return stopped_by is None and (self.state == "running" or self.exit_code is not None)

    @property
    def terminated(self) -> bool:
        """Ended by the agent's own SIGTERM, sent because another rank had failed."""
        return self.state != "failed" and self.exit_code == -signal.SIGTERM

    @property
    def blame(self) -> tuple[int, float, int]:
        """Sorts the cause before its consequences: the agent looks ten times a second, its peers notice sooner."""
        lost_peer = self.state == "failed" and any(text in self.error.lower() for text in _PEER_LOST)
        return 2 if self.terminated else 1 if lost_peer else 0, self.time, self.rank

    @property
    def how(self) -> str:
        if self.exit_code is not None and self.exit_code < 0:
            try:
                name = signal.Signals(-self.exit_code).name
            except ValueError:
                name = f"signal {-self.exit_code}"
            return f"killed by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")
        return f"exit code {self.exit_code or 0}" + ("" if self.state == "failed" else ", before its work was done")


def failure_block(failed: Sequence[_Ending], ranks: int) -> str:
    """The first failure with the end of its log; the others in one line."""
    first, others = failed[0], failed[1:]
    headline = f"rank {first.rank} of {ranks} failed: {first.how}" + (f", {first.error}" if first.error else "")
    lines = [headline, *(f"  | {line}" for line in last_lines(first.log, _LINES_SHOWN)), f"  whole log: {first.log}"]
    if others:
        lines.append("  after it: " + ", ".join(f"rank {ending.rank} ({ending.how})" for ending in others))
    return "\n".join(lines)


def last_lines(path: Path, count: int) -> list[str]:
    """The last ``count`` lines of a text file that are not blank; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def _seen_at(failure: Any) -> float:
    """When the agent saw the end; it cuts to whole seconds, so the latest moment it can mean."""
    return time.time() if failure is None else float(failure.timestamp) + 1.0


def _logs_specs(folder: Path, ranks: int) -> LogsSpecs:
    """Rank 0 writes to our standard output (a progress bar needs the terminal); the rest goes to one file a rank."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class FolderLogs(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for rank, environment in envs.items():
                environment["TORCHELASTIC_ERROR_FILE"] = str(folder / f"rank-{rank}.error.json")
            return LogsDest(
                # The agent opens standard output and error apart, so the rank itself joins them (`run_as_rank`).
                stdouts={rank: "" if rank == 0 else os.devnull for rank in range(ranks)},
                stderrs={rank: str(folder / f"rank-{rank}.log") for rank in range(ranks)},
                error_files={rank: str(folder / f"rank-{rank}.error.json") for rank in range(ranks)},
            )

        @property
        def root_log_dir(self) -> str:
            return str(folder)

    return FolderLogs()


def _kill_remaining(logs: Path, ranks: int) -> None:
    """After a second signal the agent gives up waiting: end what is still there. Only children of ours."""
    for rank in range(ranks):
        record = RankRecord.read(logs, rank)
        if record is not None and record.state == "running" and _parent_of(record.pid) == os.getpid():
            os.kill(record.pid, signal.SIGKILL)


def _parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Elastic hands its ranks our environment: change it while they start, and put it back."""
    before = {name: os.environ.get(name) for name in (*changes, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _relayed_signals(logs: Path, ranks: int) -> Iterator[None]:
    """Let a first signal reach the agent, which passes it on and waits; let a second one kill what is left.

    Our own handlers: elastic's would wait a second time, and it leaves them behind.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    received: list[int] = []

    def relay(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            _kill_remaining(logs, ranks)
        else:
            raise SignalException(f"received {signal.Signals(number).name}", sigval=signal.Signals(number))

    before = {number: signal.signal(number, relay) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    before[signal.SIGQUIT] = signal.getsignal(signal.SIGQUIT)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """What elastic would log about failures and signals is said by us, once and shorter."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:  # each of its modules has set a level of its own
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # it leaves log files and sockets to the collector
            yield
            gc.collect()
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
