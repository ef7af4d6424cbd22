"""Steps that overlap: what is predicted, traced and measured of a steady one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.job.job import Job
from meshwright.ledger.compare import Tolerances, compare
from meshwright.plan.predict import predict
from meshwright.prove.ledgers import hold_together, ranks_to_trace
from meshwright.prove.pool import RankPool
from meshwright.prove.trace import trace
from tests.small_jobs import small_job

LAYOUT = "pp=2 schedule=2bw micro_batch=1"
EXACT = Tolerances(activations=0.0, wire=0.0)


def job_of(layout: str, **train: object) -> Job:
    return small_job(layout, optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 1.0}, train=train)


@pytest.mark.parametrize("layout", [LAYOUT, pytest.param(f"dp=2 zero=1 {LAYOUT}", marks=pytest.mark.all)])
def test_the_three_ledgers_agree(ranks: Callable[[int], RankPool], layout: str) -> None:
    job = job_of(layout)
    agreement = hold_together(ranks(job.layout.ranks), job, layout, ranks_to_trace(job.layout))
    assert [one for one in agreement.differences if not one.agrees] == []
    assert agreement.sums


@pytest.mark.parametrize(
    ("layout", "deterministic"),
    [
        ("pp=3 schedule=2bw micro_batch=1", False),
        pytest.param("tp=2 pp=2 schedule=2bw micro_batch=1 recompute=selective", False, marks=pytest.mark.all),
        pytest.param("dp=2 pp=2 schedule=2bw micro_batch=1", True, marks=pytest.mark.all),
    ],
)
def test_what_is_predicted_is_traced_to_the_byte(layout: str, deterministic: bool) -> None:
    job = job_of(layout, deterministic=deterministic)
    found = compare([predict(job, backend="gloo"), trace(job, range(job.layout.ranks))], EXACT)
    assert [one for one in found if not one.agrees] == []


def test_parameters_and_gradients_are_there_twice_and_moments_once() -> None:
    late, plain = (predict(job_of(layout)) for layout in (LAYOUT, "pp=2 micro_batch=1"))
    for one, other in zip(late.ranks, plain.ranks, strict=True):
        assert one.stores.parameters == 2 * other.stores.parameters
        assert one.stores.gradients == 2 * other.stores.gradients
        assert one.stores.optimizer == other.stores.optimizer
        assert one.sends == other.sends
        assert one.computes == other.computes
