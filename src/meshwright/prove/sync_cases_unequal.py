"""Cases of ``--matrix sync``: replicas with unequal shares of the batch, one with nothing, and shares that change.

All have masks: rows count from none to all of their labels, so any mean of means shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.job.batch_section import BatchSection
from meshwright.job.job import Job
from meshwright.job.layout_text import parse_layout
from meshwright.job.validate import check_job
from meshwright.prove.check import OptimizerName, Prover, case_request
from meshwright.prove.layout_run import Request
from meshwright.prove.matrix import Case
from meshwright.prove.parity import Parity

_CHANGING = ((1, 2, 5), (5, 0, 3), (0, 8, 0), (3, 3, 2))
"""Sequences of three replicas, another division in each step."""


@dataclass(frozen=True)
class UnequalCase:
    """A layout and its replicas' shares."""

    case: Case
    split: tuple[int, ...]
    limits: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()
    """Of each replica, step by step and round again; empty: always by ``split``."""

    def prove(self, prover: Prover, job: Job, dtype: str, steps: int) -> Iterator[Parity]:
        """Losses, gradients and parameters as on one device."""
        optimizers: tuple[OptimizerName, ...] = ("sgd", "adamw")
        for optimizer in optimizers:
            yield prover.prove(self.request(job, dtype, optimizer, steps), self.case.label)

    def request(self, job: Job, dtype: str, optimizer: OptimizerName, steps: int) -> Request:
        """The run that is proven."""
        plain = case_request(job, self.case, dtype, optimizer, steps)
        values: dict[str, Any] = {"global_size": self.case.global_size, "split": self.split}
        batch = BatchSection(**values, micro_batch_limits=self.limits or None)
        changed = plain.job.model_copy(update={"batch": batch})
        check_job(changed)
        return replace(plain, job=changed, sequences=self.sequences)


def unequal_cases() -> Iterator[UnequalCase]:
    """1:3 and 1:2:5 under every kind of data parallelism, alone and with tensor and pipeline groups as replicas."""
    for zero in range(4):
        yield _case(f"dp=2 zero={zero} micro_batch=2", 1, 3)
        yield _case(f"dp=3 zero={zero} micro_batch=2", 1, 2, 5)
        yield _case(f"dp=3 zero={zero} micro_batch=3", 3, 0, 5)
        yield _case(f"dp=2 tp=2 zero={zero} micro_batch=2", 1, 3)
        yield _case(f"dp=2 pp=2 zero={zero} micro_batch=2", 1, 3)
    for zero in (1, 2, 3):
        yield _case(f"dp=4 shard=2 zero={zero} micro_batch=2", 1, 2, 5, 0)
    yield _case("dp=2 pp=2 schedule=zbv zero=1 micro_batch=2", 1, 3)
    yield _case("dp=2 pp=2 schedule=interleaved zero=2 micro_batch=2", 3, 1)
    yield _case("dp=2 tp=2 pp=2 zero=1 micro_batch=2", 1, 7)
    yield _case("dp=2 tp=2 zero=3 micro_batch=4", 0, 1)
    for zero in (0, 3):
        case = _case(f"dp=3 zero={zero} micro_batch=2", 1, 2, 5)
        label = f"{case.case.label}, at most 1, 2 and 3 a micro-batch"
        yield replace(case, case=replace(case.case, label=label), limits=(1, 2, 3))
        changed = replace(case.case, label=f"dp=3 zero={zero}, another division in each step")
        yield replace(case, case=changed, sequences=_CHANGING)


def _case(text: str, *shares: int) -> UnequalCase:
    label = f"{text.replace(' micro_batch=', ', micro-batches of ')}, shares {':'.join(map(str, shares))}"
    return UnequalCase(Case(label, parse_layout(text)), shares)
