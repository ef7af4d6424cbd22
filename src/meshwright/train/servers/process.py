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
from meshwright.sync.server.protocol import Message, ProtocolError, Run
from meshwright.sync.server.replica import COORDINATOR, Replica
from meshwright.sync.server.sockets import listen
from meshwright.sync.server.worker_link import WorkerLink
from meshwright.train.servers.compute import Computing, join_alone
from meshwright.train.servers.shapes import Shapes, fingerprint
from meshwright.train.servers.store import fresh_store, resumed_store
from meshwright.train.worker import prepare_determinism

FACTS = "servers.json"
TOKEN = "servers.token"


def write_token(run_dir: Path) -> str:
    """A new secret for a run, in a file that only its owner may read."""
    token = secrets.token_hex(32)
    path = run_dir / TOKEN
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return token


def read_run(run_dir: Path) -> tuple[Job, Run, tuple[str, int], dict[str, object]]:
    """The job, the secret, the coordinator's address and what else the launcher left for its processes.

    Raises:
        InputError: the directory holds no such run.
    """
    try:
        facts = json.loads((run_dir / FACTS).read_text(encoding="utf-8"))
        token = (run_dir / TOKEN).read_text(encoding="utf-8")
        host, port = facts["coordinator"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{run_dir} holds no parameter-server run that is going ({type(error).__name__}: {error}); "
            "give the directory of one, started with sync.strategy=server"
        ) from None
    job = run_job(run_dir)
    return job, Run(token, fingerprint(job)), (str(host), int(port)), facts


def serve(run_dir: Path, shard: int, name: str) -> None:
    """Own a shard until the coordinator says that all is done, or others have taken over."""
    job, run, coordinator, facts = read_run(run_dir)
    began = time.monotonic()
    shapes = Shapes(job)
    checkpoint, version = facts.get("checkpoint"), int(str(facts["version"]))
    store = fresh_store(shapes, shard) if checkpoint is None else resumed_store(shapes, shard, Path(str(checkpoint)))
    replica = Replica(name, shard, store, version=version)
    node = Node(replica, name, run, listen(job.sync.server_host, None), report=print_line)
    try:
        node.connect(COORDINATOR, coordinator)
    except (OSError, EOFError) as error:
        where = f"{coordinator[0]}:{coordinator[1]}"
        raise MeshwrightError(f"the coordinator at {where} cannot be reached ({error})") from None
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
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--server", type=int, metavar="SHARD", help="own this shard")
    role.add_argument("--worker", type=int, metavar="INDEX", help="compute gradients; its home among the workers")
    parser.add_argument("--name", help="unique in the run; absent: made up")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    unique = secrets.token_hex(3)
    if options.server is not None:
        name = options.name or f"server-{options.server}.{unique}"
        run_as_rank(lambda: _with_threads(serve, options.run_dir, options.server, name))
    name = options.name or f"worker-{options.worker}.{unique}"
    run_as_rank(lambda: _with_threads(work, options.run_dir, options.worker, name))


def _with_threads(role: Callable[[Path, int, str], None], run_dir: Path, index: int, name: str) -> None:
    torch.set_num_threads(threads())
    role(run_dir, index, name)


if __name__ == "__main__":
    main()
