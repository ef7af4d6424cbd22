"""A server or a worker of a parameter-server run, as the launcher starts it, or a person on another machine.

    python -m meshwright.train.servers.process RUN_DIR --server SHARD --name NAME
    python -m meshwright.train.servers.process RUN_DIR --worker INDEX --name NAME

Where the coordinator listens stands in ``RUN_DIR/servers.json``, the run's token in ``RUN_DIR/servers.token``, which
only its owner may read.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.data.corpora import open_corpora
from meshwright.errors import InputError, MeshwrightError
from meshwright.files import replace_text
from meshwright.job.job import Job, run_job
from meshwright.recovery.rank import RECORDS_VARIABLE, print_line, run_as_rank
from meshwright.recovery.threads import threads
from meshwright.sync.server.client import Worker
from meshwright.sync.server.node import Node, beat
from meshwright.sync.server.protocol import NAME, Message, ProtocolError, Run
from meshwright.sync.server.replica import COORDINATOR, Replica
from meshwright.sync.server.sockets import listen, unreachable
from meshwright.sync.server.worker_link import WorkerLink
from meshwright.train.servers.compute import Computing, join_alone
from meshwright.train.servers.shapes import Shapes, fingerprint
from meshwright.train.servers.store import fresh_store, resumed_store
from meshwright.train.servers.whereabouts import read_whereabouts
from meshwright.train.worker import prepare_determinism


def read_run(run_dir: Path) -> tuple[Job, Run, tuple[str, int], dict[str, Any]]:
    """The job, the secret, the coordinator's address and what else the launcher left for its processes.

    Raises:
        InputError: the directory holds no such run.
    """
    facts, token, coordinator = read_whereabouts(run_dir)
    job = run_job(run_dir)
    return job, Run(token, fingerprint(job), job.sync.server_timeout), coordinator, facts


def serve(run_dir: Path, shard: int, name: str) -> None:
    """Own a shard until the coordinator says that all is done, or others have taken over."""
    job, run, coordinator, facts = read_run(run_dir)
    if not 0 <= shard < job.sync.servers:
        raise InputError(f"--server: there is no shard {shard} in this run; use 0 to {job.sync.servers - 1}")
    began = time.monotonic()
    shapes = Shapes(job)
    checkpoint, version = facts.get("checkpoint"), facts["version"]
    store = fresh_store(shapes, shard) if checkpoint is None else resumed_store(shapes, shard, Path(str(checkpoint)))
    replica = Replica(name, shard, store, version=version)
    node = Node(replica, name, run, listen(job.sync.server_host, None), report=print_line)
    try:
        node.connect(COORDINATOR, coordinator)
    except (OSError, EOFError) as error:
        raise MeshwrightError(unreachable(coordinator, error)) from None
    host, port = node.address
    node.tell(COORDINATOR, Message("register", {"shard": shard, "host": host, "port": port}))
    beat(node, COORDINATOR, job.sync.server_timeout / 4)
    node.done.wait()
    node.close()
    stores = store.owned
    _leave(name, {
        "shard": shard,
        "parameters": _bytes(piece.master for piece in stores),
        "gradients": _bytes(piece.gradient for piece in stores),
        "optimizer": _bytes(tensor for tensors in store.optimizer.state().values() for tensor in tensors),
        "most_waiting": replica.most_waiting,
        "pushes": node.messages["in", "push"],
        "push_bytes": node.payload["in", "push"],
        "passed_on_bytes": node.payload["out", "push"],
        "values_bytes": node.payload["out", "values"],
        "busy_seconds": round(node.busy_seconds, 3),
        "alive_seconds": round(time.monotonic() - began, 3),
    })  # fmt: skip
    if replica.deposed:
        raise ProtocolError(f"{name} is out of shard {shard}: others have gone on without it")
    if replica.orphaned:
        raise ProtocolError("the coordinator is gone")


def work(run_dir: Path, index: int, name: str) -> None:
    """Compute gradients until the coordinator says stop."""
    job, run, coordinator, _ = read_run(run_dir)
    if index < 0:
        raise InputError(f"--worker: {index} is no worker's index; use 0 to {job.layout.dp - 1}, or more to join them")
    prepare_determinism(job)
    join_alone()
    corpora = open_corpora(job.data, job.model.vocabulary)
    worker = Worker(name, index, Computing(job, corpora.training, corpora.validation))

    def leave(_number: int, _frame: object) -> None:
        worker.leaving = True

    signal.signal(signal.SIGTERM, leave)
    link = WorkerLink(worker, coordinator, run, job.sync.server_timeout)
    link.work()
    _leave(name, {
        "pushes": [link.by_shard["push", shard] for shard in range(job.sync.servers)],
        "push_bytes": link.payload["out", "push"],
        "pulls": [link.by_shard["values", shard] for shard in range(job.sync.servers)],
        "pull_bytes": link.payload["in", "values"],
        "accepted": worker.accepted,
        "dropped": worker.dropped,
    })  # fmt: skip


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _leave(name: str, facts: dict[str, object]) -> None:
    """Leave what was counted beside the log, for the launcher's ledger."""
    folder = os.environ.get(RECORDS_VARIABLE)
    if folder is not None:
        replace_text(Path(folder) / f"{name}.bytes.json", json.dumps(facts))


def main(arguments: list[str] | None = None) -> None:
    """Entry point; see the module."""
    parser = argparse.ArgumentParser(description="A server or a worker of a parameter-server run.")
    parser.add_argument("run_dir", type=Path)
    roles = parser.add_mutually_exclusive_group(required=True)
    roles.add_argument("--server", type=int, metavar="SHARD", help="own this shard")
    roles.add_argument("--worker", type=int, metavar="INDEX", help="compute gradients; its home among the workers")
    parser.add_argument("--name", help="unique in the run; absent: made up")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    index = options.worker if options.server is None else options.server
    kind = "worker" if options.server is None else "server"
    name = f"{kind}-{index}.{secrets.token_hex(3)}" if options.name is None else options.name
    run_as_rank(lambda: _begin(work if kind == "worker" else serve, options.run_dir, index, name))


def _begin(role: Callable[[Path, int, str], None], run_dir: Path, index: int, name: str) -> None:
    if name == COORDINATOR or not NAME.fullmatch(name):
        raise InputError(
            f'--name: "{name}" cannot be a process\'s name; use 1 to 100 letters, digits, ".", "_" and "-", other than '
            f"{COORDINATOR}, or leave it out"
        )
    torch.set_num_threads(threads())
    role(run_dir, index, name)


if __name__ == "__main__":
    main()
