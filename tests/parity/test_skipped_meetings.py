"""Replicas that train apart meet on time, also in a step that is skipped; a step that ends the run does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.prove.pool import RankPool
from meshwright.sync.diloco import DiLoCo
from meshwright.train.trainer import Trainer
from tests.delayed_recursion import spoil
from tests.small_jobs import my_batches, small_job

OVERLAPPING = {"strategy": "diloco", "period": 3, "overlap": 1}


def alike(trainer: Trainer) -> bool:
    """Whether both replicas hold the same parameters."""
    mine = torch.cat([piece.master for piece in trainer.owned])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return torch.equal(*both)


def on_its_way(trainer: Trainer) -> bool:
    """Whether a sum of outer gradients is."""
    assert trainer.apart is not None
    strategy = trainer.apart.strategy
    return isinstance(strategy, DiLoCo) and any(each.under_way is not None for each in strategy._fragments)


def states(job: Job, bad_step: int) -> list[tuple[bool, bool, bool]]:
    """On a rank, after each step: whether it was applied, replicas are alike, and a sum is on its way."""
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        spoil(trainer, bad_step)
        found = []
        for step in range(job.train.steps):
            report = trainer.step(my_batches(job, mesh, step))
            found.append((report.applied, alike(trainer), on_its_way(trainer)))
            if trainer.must_stop(report):
                break
        return found


def published_when_settled(job: Job) -> tuple[int, int]:
    """On a rank: how often it publishes while it takes in what was on its way; how many fragments it owns part of."""
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        trainer.step(my_batches(job, mesh, 0))
        assert trainer.apart is not None
        publish, calls = trainer.data_parallel.publish, 0

        def counted() -> None:
            nonlocal calls
            calls += 1
            publish()

        trainer.data_parallel.publish = counted  # type: ignore[method-assign]
        trainer.apart.settle()
        return calls, sum(bool(pieces) for pieces in trainer.apart.fragments.values())


@pytest.mark.all
def test_all_ranks_of_a_replica_publish_together(ranks: Callable[[int], RankPool]) -> None:
    """Also where what was on its way is all of one rank of a replica, and none of another."""
    sync = {"strategy": "diloco", "period": 64, "fragments": 32, "overlap": 1}
    job = small_job("dp=4 shard=2 zero=1", sync=sync, memory={"bucket_bytes": 1 << 26}, train={"steps": 64})
    found = ranks(4).run(published_when_settled, job)
    assert [calls for calls, _ in found] == [1] * 4
    assert min(parts for _, parts in found) < 32


def run(ranks: Callable[[int], RankPool], sync: dict[str, Any], nonfinite: str, bad_step: int, steps: int) -> Any:
    job = small_job("dp=2", sync=sync, train={"nonfinite": nonfinite, "steps": steps})
    return ranks(2).run(states, job, bad_step)[0]


@pytest.mark.parametrize("sync", [OVERLAPPING, {"strategy": "local", "period": 3}], ids=lambda sync: sync["strategy"])
def test_a_skipped_step_moves_no_meeting(ranks: Callable[[int], RankPool], sync: dict[str, Any]) -> None:
    overlaps = "overlap" in sync
    found = run(ranks, sync, "skip", 2, 4)
    assert found == [(True, False, False), (True, False, overlaps), (False, True, False), (True, True, False)]
    *_, before, last = run(ranks, sync, "skip", 4, 5)  # the last meeting, in the last step
    assert before == (True, False, False) and last == (False, True, False)


def test_a_step_that_ends_the_run_changes_nothing(ranks: Callable[[int], RankPool]) -> None:
    assert run(ranks, OVERLAPPING, "stop", 2, 4)[-1] == (False, False, True)
