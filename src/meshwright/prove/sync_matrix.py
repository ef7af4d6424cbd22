"""The standard set of ``meshwright check --matrix sync``: every way to synchronise, against one device.

A file ``prove/sync_cases_*.py`` holds the cases of one kind. Most are a layout and a [sync] section, proven as a
layout is; a case may have a proof of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwright.job.job import Job
from meshwright.job.validate import check_job
from meshwright.prove.check import OptimizerName, Prover, Report, case_request
from meshwright.prove.layout_run import Request
from meshwright.prove.matrix import Case
from meshwright.prove.parity import Parity
from meshwright.prove.sync_cases_algorithms import algorithm_cases
from meshwright.prove.sync_cases_compression import compression_cases
from meshwright.prove.sync_cases_local import local_cases
from meshwright.prove.sync_cases_server import SERVER_CASES, server_proofs
from meshwright.prove.sync_cases_unequal import unequal_cases
from meshwright.prove.sync_proof import SameRun, SyncProof


@dataclass(frozen=True)
class SyncCase:
    """One way to synchronise, and how it is proven."""

    label: str
    ranks: int
    prove: Callable[[Prover, Job, str, int], Iterable[Parity]]
    """(prover, job, dtype, steps) -> the verdicts."""


def sync_cases(max_ranks: int = 8) -> list[SyncCase]:
    """Every case that needs no more ranks than that."""
    cases = [against_one_device(case, values) for case, values in algorithm_cases()]
    extra: list[SyncProof | SameRun] = [*compression_cases(), *local_cases()]
    cases += [SyncCase(proof.label, proof.ranks, proof.prove) for proof in extra]
    cases += [server_case(*case) for case in SERVER_CASES]
    cases += [SyncCase(one.case.label, one.case.layout.ranks, one.prove) for one in unequal_cases()]
    return [case for case in cases if case.ranks <= max_ranks]


def server_case(label: str, workers: int, sync: dict[str, Any], train: dict[str, Any]) -> SyncCase:
    """A parameter server."""
    return SyncCase(label, workers, partial(server_proofs, label=label, workers=workers, sync=sync, train=train))


def against_one_device(
    case: Case, values: Mapping[str, Any], optimizers: tuple[OptimizerName, ...] = ("sgd", "adamw")
) -> SyncCase:
    """The layout of ``case`` under a [sync] of these ``values``: losses, gradients and parameters as on one device."""

    def prove(prover: Prover, job: Job, dtype: str, steps: int) -> Iterator[Parity]:
        for optimizer in optimizers:
            yield prover.prove(_request(job, case, values, dtype, optimizer, steps), case.label)

    return SyncCase(case.label, case.layout.ranks, prove)


def _request(
    job: Job, case: Case, values: Mapping[str, Any], dtype: str, optimizer: OptimizerName, steps: int
) -> Request:
    request = case_request(job, case, dtype, optimizer, steps)
    changed = request.job.model_copy(update={"sync": type(job.sync).model_validate(dict(values))})
    check_job(changed)
    return Request(changed, request.steps, request.samples, request.gradient_steps)


def check_sync(
    job: Job,
    *,
    dtype: str,
    max_ranks: int,
    steps: int = 10,
    report: Report | None = None,
    cases: Iterable[SyncCase] | None = None,
) -> list[Parity]:
    """Every case of the set."""
    results = []
    plain = job.model_copy(update={"sync": type(job.sync)()})
    with Prover() as prover:
        for case in sync_cases(max_ranks) if cases is None else cases:
            for result in case.prove(prover, plain, dtype, steps):
                results.append(result)
                if report:
                    report(result)
    return results
