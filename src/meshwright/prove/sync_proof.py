"""Proofs of ways to synchronise that set more than [sync]: the optimizer, what is compared, or what with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.job.job import Job
from meshwright.job.layout_text import parse_layout
from meshwright.job.validate import check_job
from meshwright.prove.check import OptimizerName, Prover, case_request
from meshwright.prove.layout_run import Request, run_layout
from meshwright.prove.matrix import Case
from meshwright.prove.parity import PARAMETER_BOUNDS, Parity, compare

_LONG = 10_000
"""Steps of the run of which a proof is the beginning: more than any period or number of first steps."""


@dataclass(frozen=True)
class SyncProof:
    """One way to synchronise, held against one device.

    The gradients that a step applies may be others than one device's (they hold momentum, or they are a replica's own):
    then parameters and losses alone are compared.
    """

    label: str
    layout: str
    sync: Mapping[str, Any]
    optimizer: OptimizerName = "sgd"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the optimizer, in place of the proof's."""
    gradients: bool = True
    kv_heads: int = 2
    tied: bool = False
    global_size: int = 8

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return parse_layout(self.layout).ranks

    def request(self, job: Job, dtype: str, steps: int, sync: Mapping[str, Any] | None = None) -> Request:
        """The run that is proven; ``sync`` in place of its own."""
        layout = parse_layout(self.layout)
        plain = layout if layout.zero or layout.shard is None else layout.model_copy(update={"shard": None})
        case = Case(self.label, plain, self.kv_heads, self.tied, global_size=self.global_size)
        request = case_request(job, case, dtype, self.optimizer, steps)
        changed = request.job.model_copy(
            update={
                "layout": layout,
                "sync": type(job.sync).model_validate(dict(self.sync if sync is None else sync)),
                "optimizer": request.job.optimizer.model_copy(update=dict(self.settings)),
            }
        )
        check_job(changed.with_steps(_LONG))
        changed = changed.with_steps(steps)  # replicas meet at the end
        return Request(changed, request.steps, request.samples, request.gradient_steps if self.gradients else 0)

    def prove(self, prover: Prover, job: Job, dtype: str, steps: int) -> Iterator[Parity]:
        """Against one device."""
        yield prover.prove(self.request(job, dtype, steps), self.label)


@dataclass(frozen=True)
class SameRun:
    """Two ways to synchronise that must lead to the same parameters."""

    proof: SyncProof
    other: Mapping[str, Any]
    """The other [sync]."""

    @property
    def label(self) -> str:
        """Of the first."""
        return self.proof.label

    @property
    def ranks(self) -> int:
        """How many both take."""
        return self.proof.ranks

    def prove(self, prover: Prover, job: Job, dtype: str, steps: int) -> Iterable[Parity]:
        """The first against the second."""
        request = self.proof.request(job, dtype, steps)
        layout, optimizer = request.job.layout, request.job.optimizer
        expected = run_layout(prover.pool(layout.ranks), self.proof.request(job, dtype, steps, self.other))
        found = run_layout(prover.pool(layout.ranks), request)
        yield compare(
            found, expected, label=self.label, layout=str(layout), ranks=layout.ranks, dtype=dtype,
            optimizer=optimizer.name, clipped=False, learning_rate=optimizer.lr,
            bound=PARAMETER_BOUNDS[dtype, optimizer.name], gradient_steps=0,
        )  # fmt: skip
