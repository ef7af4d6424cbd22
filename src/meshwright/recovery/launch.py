"""Start the ranks of this machine, pass signals on, keep them going, and say in one block why they ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.job.recovery_section import RecoverySection
from meshwright.recovery.endings import last_lines
from meshwright.recovery.generation import Plan, Replan
from meshwright.recovery.supervise import RanksFailed, Supervisor
from meshwright.recovery.threads import threads_per_rank

__all__ = ["Launch", "RanksFailed", "check_port", "last_lines", "launch"]

WORKER = "meshwright.train.worker"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One start of local ranks.

    Attributes:
        run_directory: passed to the module as its first argument; ``logs/`` in it takes the rank logs.
        ranks: processes to start.
        module: run as ``python -m module run_directory *arguments`` in every rank.
        port: of rank 0's store on loopback; ``None`` takes a free one.
        grace_seconds: how long ranks may take to save and stop after a signal before they are killed.
        environment: further variables for the ranks.
        job: of a training run; says what happens when a rank fails. Absent: that ends the run.
        replan: finds a layout for fewer ranks.
    """

    run_directory: Path
    ranks: int
    module: str = WORKER
    arguments: Sequence[str] = ()
    port: int | None = None
    grace_seconds: float = 60
    environment: Mapping[str, str] = field(default_factory=dict)
    job: Job | None = None
    replan: Replan | None = None

    def run(self) -> None:
        """Start the ranks and wait for them. Rank 0 has our standard output; everything else goes to the logs.

        A first SIGINT, SIGTERM or SIGHUP is passed on, and the ranks have ``grace_seconds`` to save and stop;
        a second one kills them. No rank outlives this call, nor this process, however it ends.

        Raises:
            InputError: the port is taken, or a rank refused the job.
            TrainingStopped: the ranks stopped by agreement, or on a signal.
            RanksFailed: a rank failed, and ``[recovery]`` does not let it start again.
        """
        check_port(self.port)
        Supervisor(
            Plan(
                run_directory=self.run_directory,
                ranks=self.ranks,
                module=self.module,
                arguments=self.arguments,
                port=self.port or 0,
                grace_seconds=self.grace_seconds,
                environment=self._variables(),
                section=self.job.recovery if self.job is not None else RecoverySection(restarts=0),
                job=self.job,
                replan=self.replan,
            )
        ).run()

    def _variables(self) -> dict[str, str]:
        defaults = {
            "OMP_NUM_THREADS": str(threads_per_rank(self.ranks)),
            "GLOO_SOCKET_IFNAME": "lo",
            # Large buffers come and go every micro-batch: huge pages save most of their page faults.
            "THP_MEM_ALLOC_ENABLE": "1",
        }
        # For modules that find each other by torch's own variables; training has a store of its own.
        meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(self.port or free_port())}
        return {
            **{name: os.environ.get(name, value) for name, value in defaults.items()}, **meeting, **self.environment
        }  # fmt: skip


def launch(
    run_directory: Path,
    job: Job,
    arguments: Sequence[str] = (),
    *,
    port: int | None = None,
    replan: Replan | None = None,
) -> None:
    """Train ``job``, resolved, in ``run_directory`` on processes of this machine; see ``Launch.run``."""
    Launch(
        run_directory=run_directory, ranks=job.layout.ranks, arguments=arguments, port=port, job=job, replan=replan
    ).run()


def free_port() -> int:
    """A port on loopback that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(port: int | None) -> None:
    """Refuse a port that cannot be had.

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
