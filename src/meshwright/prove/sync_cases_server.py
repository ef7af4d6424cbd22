"""Cases of ``check --matrix sync``: the parameter server, against one device and, bit for bit, against all-reduce.

Servers and workers run in one process (``prove.server_run``); the all-reduce they are held against runs on ranks.
``ordered``: gradients are summed in rank order, and the norm's bits do not depend on how they are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.job.job import Job
from meshwright.job.validate import check_job
from meshwright.prove.check import OptimizerName, Prover, case_request
from meshwright.prove.layout_run import Request, run_layout
from meshwright.prove.matrix import Case
from meshwright.prove.parity import PARAMETER_BOUNDS, Parity, compare
from meshwright.prove.server_run import rehearse

_SHARED: dict[str, Any] = {"servers": 3, "server_replicas": 2}
SERVER_CASES: tuple[tuple[str, int, dict[str, Any], dict[str, Any]], ...] = (
    ("server synchronous", 2, {"servers": 2}, {}),
    ("server synchronous, 3 shards on 2 replicas", 4, _SHARED, {}),
    ("server synchronous, consistent hashing", 2, {"servers": 2, "server_placement": "hash"}, {}),
    ("server synchronous, deterministic, 4 micro-batches", 2, {"servers": 2}, {"deterministic": True}),
    ("server asynchronous, one worker", 1, {"servers": 2, "server_mode": "asynchronous"}, {}),
    ("server stale-synchronous, bound 0", 2,
     {"servers": 2, "server_mode": "stale-synchronous", "staleness_bound": 0}, {}),
)  # fmt: skip
"""Label, workers, [sync], [train]."""


def server_proofs(
    prover: Prover, job: Job, dtype: str, steps: int, *, label: str, workers: int, sync: dict[str, Any],
    train: dict[str, Any],
) -> Iterator[Parity]:  # fmt: skip
    """Each optimizer: against one device within the bound, and against ordered all-reduce with no bit different."""
    for optimizer in ("sgd", "adamw"):
        request = _request(job, dtype, optimizer, steps, workers, sync, train)
        found, _ = rehearse(request)
        expected = prover.oracle(request)
        yield _verdict(request, label, found, expected, PARAMETER_BOUNDS[dtype, optimizer])
        ranks = _reference(job, dtype, optimizer, steps, workers, train)
        together = run_layout(prover.pool(workers), ranks)
        yield _verdict(request, f"{label} = all-reduce in rank order", found, together, 0.0)


def _request(
    job: Job, dtype: str, optimizer: OptimizerName, steps: int, workers: int, sync: dict[str, Any],
    train: dict[str, Any],
) -> Request:  # fmt: skip
    case = _case(workers, train)
    request = case_request(job, case, dtype, optimizer, steps)
    section = type(job.sync).model_validate({"strategy": "server", **sync})
    changed = request.job.model_copy(
        update={"sync": section, "train": request.job.train.model_copy(update={**train, "nonfinite": "stop"})}
    )
    check_job(changed)
    return replace(request, job=changed)


def _reference(
    job: Job, dtype: str, optimizer: OptimizerName, steps: int, workers: int, train: dict[str, Any]
) -> Request:
    """The same on ranks. Where gradients are clipped, in the mode whose norm does not depend on the cuts."""
    request = case_request(job, _case(workers, train), dtype, optimizer, steps)
    changed = request.job.model_copy(
        update={"train": request.job.train.model_copy(update={"deterministic": True}), "sync": type(job.sync)()}
    )
    check_job(changed)
    return replace(request, job=changed)


def _case(workers: int, train: dict[str, Any]) -> Case:
    from meshwright.job.layout_text import parse_layout

    # A micro-batch a worker, so that rank order and the order of micro-batches are one; or several, where
    # micro-batches travel apart.
    micro_batch = 1 if train.get("deterministic") else 8 // workers
    return Case("", parse_layout(f"dp={workers} micro_batch={micro_batch}"))


def _verdict(request: Request, label: str, found: Any, expected: Any, bound: float) -> Parity:
    job = request.job
    optimizer = job.optimizer
    clipped = optimizer.clip_norm is not None and max(expected.norms) > optimizer.clip_norm
    return compare(
        found, expected, label=label, layout=str(job.layout), ranks=job.layout.dp, dtype=job.precision.dtype,
        optimizer=optimizer.name, clipped=clipped, learning_rate=optimizer.lr, bound=bound,
    )  # fmt: skip
