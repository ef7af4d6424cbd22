"""What replicas that train apart do at a meeting is what the job's ``[sync]`` says, in real training steps.

A replica that does not meet yet shows what the others bring: its first step is that of the same job with a longer
period.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray

from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.prove.pool import RankPool
from meshwright.train.trainer import Trainer
from tests.small_jobs import my_batches, small_job

Ranks = Callable[[int], RankPool]
Values = NDArray[Any]


@dataclass
class Steps:
    """All parameters of a replica in one row, and the shared model, before and after each step."""

    replica: list[Values]
    shared: list[Values]


def whole(tensors: list[Any]) -> Values:
    return numpy.concatenate([tensor.detach().numpy().reshape(-1) for tensor in tensors])


def train(jobs: Sequence[Job], steps: int) -> list[Steps]:
    """On a rank that is a replica of its own: each of these jobs, which have one layout, from its start."""
    with Mesh(jobs[0].layout) as mesh:
        return [train_one(job, mesh, steps) for job in jobs]


def train_one(job: Job, mesh: Mesh, steps: int) -> Steps:
    trainer = Trainer(job, mesh)
    assert trainer.apart is not None
    found = Steps([], [])
    for step in range(steps + 1):
        found.replica.append(whole([piece.master for piece in trainer.owned]))
        found.shared.append(whole(trainer.apart.model()))
        if step < steps:
            trainer.step(my_batches(job, mesh, step, masked=False))
    trainer.apart.close()
    return found


def job_of(layout: str, **sync: Any) -> Job:
    return small_job(layout, sync=sync, optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.0})


def test_two_replicas_go_as_far_as_the_job_says(ranks: Ranks) -> None:
    """To the center by the elasticity, or to the shared model but for what is kept of their own."""
    each = (
        {"strategy": "local", "period": 2},
        {"strategy": "easgd", "period": 1, "elasticity": 0.3},
        {"strategy": "diloco", "period": 1, "keep_local": 0.25},
    )
    found = ranks(2).run(train, [job_of("dp=2 micro_batch=4", **sync) for sync in each], 1)
    for alone, elastic, outer in found:
        start, brought = alone.replica
        assert elastic.replica[1] == pytest.approx(brought - 0.3 * (brought - start), abs=1e-12)
        assert outer.replica[1] == pytest.approx(0.75 * outer.shared[1] + 0.25 * brought, abs=1e-12)
    assert numpy.abs(found[0][0].replica[1] - found[1][0].replica[1]).max() > 1e-4, "they had gone apart"


def test_near_replicas_meet_more_often_than_all(ranks: Ranks) -> None:
    each = ({"period": 4}, {"period": 2, "group_size": 2, "group_period": 1})
    jobs = [job_of("dp=4 micro_batch=2", strategy="local", **sync) for sync in each]
    found = ranks(4).run(train, jobs, 2)
    for replica, (_, met) in enumerate(found):
        brought = [alone.replica[1] for alone, _ in found[replica // 2 * 2 : replica // 2 * 2 + 2]]
        assert met.replica[1] == pytest.approx(sum(brought) / 2, abs=1e-12)
        assert numpy.array_equal(met.replica[2], found[0][1].replica[2])
    assert numpy.abs(found[0][1].replica[1] - found[2][1].replica[1]).max() > 1e-4
