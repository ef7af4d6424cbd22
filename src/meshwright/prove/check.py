"""Runs proofs: layouts against one device, and planted errors that must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import InputError, MeshwrightError
from meshwright.job.batch_section import BatchSection
from meshwright.job.fault_section import FaultSection
from meshwright.job.job import Job
from meshwright.job.recovery_section import RecoverySection
from meshwright.job.sections import CheckpointSection, ModelSection, ObserveSection, OptimizerSection, PrecisionSection
from meshwright.job.validate import check_job
from meshwright.prove.layout_run import Request, batch_source, run_layout
from meshwright.prove.matrix import PROOF_SEQUENCE, Case, layout_cases, proof_spec, self_test_cases
from meshwright.prove.oracle import train_one_device
from meshwright.prove.parity import PARAMETER_BOUNDS, Parity, Trace, compare
from meshwright.prove.planted import PLANTS, Plant
from meshwright.prove.pool import RankFailure, RankPool, last_line
from meshwright.prove.proof_data import ProofSamples

_LEAST_EPS = 1e-6
OptimizerName = Literal["sgd", "adamw"]
Report = Callable[[Parity], None]


@dataclass(frozen=True)
class Found:
    """Whether a planted error was found: the proof must fail, or the run must stop."""

    planted: Plant
    parity: Parity
    """What the proof made of it."""

    @property
    def label(self) -> str:
        """Of the layout."""
        return self.parity.label

    @property
    def ranks(self) -> int:
        """How many ran."""
        return self.parity.ranks

    @property
    def passed(self) -> bool:
        """The proof did not pass, as it should not."""
        return not self.parity.passed

    @property
    def how(self) -> str:
        """Where the error showed."""
        return self.parity.worst

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object: the keys of a proof, of which ``passed`` is turned, and what was planted."""
        return {**self.parity.as_json(), "planted": self.planted, "how": self.how, "passed": self.passed}


def proof_job(job: Job, case: Case, dtype: str, optimizer: OptimizerName) -> Job:
    """The job at proof size under the case's layout: constant rate, no warm-up, SGD clipped and AdamW not."""
    spec = proof_spec(job.model_spec, case)
    settings: dict[str, Any] = (
        {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0, "clip_norm": 0.5}
        if optimizer == "sgd"
        else {"name": "adamw", "lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1, "betas": job.optimizer.betas}
    )
    changed = job.model_copy(
        update={
            "model": ModelSection(**spec.model_dump()),
            "data": job.data.model_copy(update={"sequence_length": PROOF_SEQUENCE}),
            "batch": BatchSection(global_size=case.global_size),
            "optimizer": OptimizerSection(**settings),
            "precision": PrecisionSection.model_validate({"dtype": dtype}),
            "layout": case.layout,
            "memory": job.memory.model_copy(update={"bucket_bytes": 1 << 18}),
            "sync": type(job.sync)(),
            "cluster": job.cluster.model_copy(update={"ranks": case.layout.ranks, "device": "cpu"}),
            "train": job.train.model_copy(update={"nonfinite": "skip", "compile": False, "deterministic": False}),
            # A proof saves and records nothing, and nothing befalls it.
            "checkpoint": CheckpointSection(),
            "observe": ObserveSection(),
            "recovery": RecoverySection(),
            "fault": FaultSection(),
        }
    )
    check_job(changed)
    return changed


class Prover:
    """Holds the pools of ranks and the one-device runs, so that neither is made twice.

    Args:
        pools: gives the pool of a number of ranks, and closes it; absent: the prover's own.
    """

    def __init__(self, pools: Callable[[int], RankPool] | None = None) -> None:
        self._given = pools
        self._pools: dict[int, RankPool] = {}
        self._oracles: dict[str, Trace] = {}

    def __enter__(self) -> Prover:
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def pool(self, size: int) -> RankPool:
        """The pool of ``size`` ranks; idle larger ones are kept."""
        return self._given(size) if self._given else self._pools.setdefault(size, RankPool(size))

    def oracle(self, request: Request) -> Trace:
        """The one-device run of a request; it does not depend on the layout."""
        job = request.job
        key = repr(
            (
                (job.model_spec, job.optimizer, job.precision, job.batch.global_size, job.train.seed),
                (request.samples, request.steps, request.gradient_steps, job.layout.delayed),
            )
        )
        if request.samples is None or key not in self._oracles:
            trace = train_one_device(
                job,
                batch_source(request, None),
                request.steps,
                gradient_steps=request.gradient_steps,
                init_from=job.model.init_from,
                delayed=job.layout.delayed,
            )
            if request.samples is None:
                return trace
            self._oracles[key] = trace
        return self._oracles[key]

    def prove(self, request: Request, label: str) -> Parity:
        """One layout, one optimizer, one dtype against one device."""
        job, layout = request.job, request.job.layout
        optimizer, dtype = job.optimizer, job.precision.dtype
        expected = self.oracle(request)
        clipped = optimizer.clip_norm is not None and max(expected.norms) > optimizer.clip_norm
        try:
            found = run_layout(self.pool(layout.ranks), request)
        except (RankFailure, ValueError) as error:
            inf = float("inf")
            return Parity(
                label,
                str(layout),
                layout.ranks,
                dtype,
                optimizer.name,
                clipped,
                request.steps,
                inf,
                inf,
                inf,
                last_line(error),
                False,
            )
        return compare(
            found,
            expected,
            label=label,
            layout=str(layout),
            ranks=layout.ranks,
            dtype=dtype,
            optimizer=optimizer.name,
            clipped=clipped,
            learning_rate=optimizer.lr,
            bound=PARAMETER_BOUNDS[dtype, optimizer.name],
            gradient_steps=request.gradient_steps,
        )

    def self_test(self, request: Request, label: str, kind: Plant) -> Found:
        """Plant one error under one layout: found when the proof fails."""
        planted = Request(request.job, request.steps, request.samples, request.gradient_steps, kind)
        return Found(kind, self.prove(planted, label))


def case_request(job: Job, case: Case, dtype: str, optimizer: OptimizerName, steps: int) -> Request:
    """The request that proves one case of the matrix."""
    small = proof_job(job, case, dtype, optimizer)
    samples = ProofSamples(small.model_spec.vocabulary, PROOF_SEQUENCE, seed=job.train.seed, masked=case.masked)
    return Request(small, steps, samples, gradient_steps=steps if optimizer == "sgd" else 1)


def check_matrix(
    job: Job,
    *,
    dtype: str,
    max_ranks: int,
    steps: int = 10,
    report: Report | None = None,
    cases: Iterable[Case] | None = None,
) -> list[Parity]:
    """Every case of the standard set, with SGD (clipped) and AdamW (not)."""
    results = []
    with Prover() as prover:
        for case in layout_cases(max_ranks) if cases is None else cases:
            for optimizer in ("sgd", "adamw"):
                result = prover.prove(case_request(job, case, dtype, optimizer, steps), case.label)
                results.append(result)
                if report:
                    report(result)
    return results


def check_self_test(
    job: Job, *, max_ranks: int, report: Callable[[Found], None] | None = None, cases: Iterable[Case] | None = None
) -> list[Found]:
    """Plant every error in every kind of layout (float64, SGD): each must be found, and the clean run must pass."""
    results = []
    with Prover() as prover:
        for case in self_test_cases(max_ranks) if cases is None else cases:
            request = case_request(job, case, "float64", "sgd", 2)
            clean = prover.prove(request, case.label)
            if not clean.passed:
                raise MeshwrightError(f"self-test: {case.label} fails without a planted error: {clean.worst}")
            for kind in PLANTS:
                found = prover.self_test(request, case.label, kind)
                results.append(found)
                if report:
                    report(found)
    return results


def check_layout(job: Job, *, steps: int) -> Parity:
    """The job as it is, under its own layout, against one device."""
    if job.sync.strategy == "server":
        raise InputError(
            "check: sync.strategy=server has no layout to prove; use --matrix sync, which holds the servers in every "
            "mode against one device and against all-reduce"
        )
    if (job.precision.dtype, job.optimizer.name) not in PARAMETER_BOUNDS:
        raise InputError(f"check: dtype {job.precision.dtype} has no bound to hold; use float64 or float32 (--dtype)")
    optimizer = job.optimizer
    if job.precision.dtype == "float32" and optimizer.name == "adamw" and optimizer.eps < _LEAST_EPS:
        raise InputError(
            f"check: optimizer.eps={optimizer.eps:g} lets AdamW amplify float32 rounding without bound; "
            f"use at least {_LEAST_EPS:g} (--set optimizer.eps={_LEAST_EPS:g}), or --dtype float64"
        )
    first = job.with_steps(max(steps, job.train.steps))
    request = Request(first, steps, None, gradient_steps=steps if job.optimizer.name == "sgd" else 1)
    with Prover() as prover:
        return prover.prove(request, str(job.layout))
