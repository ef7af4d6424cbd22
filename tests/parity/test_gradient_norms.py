"""Each rank's own gradient norm: one that stands out is reported, and its step computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.comm.mesh import Mesh
from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.prove.pool import RankPool
from meshwright.train.corrupt import CorruptState
from meshwright.train.gradient_norms import WatchedReducer
from meshwright.train.trainer import Trainer
from tests.small_jobs import checksum, my_batches, small_job

LAYOUTS = ["dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3"]


def train(job: Job, wrong_rank: int, times: int) -> tuple[list[dict[str, Any]], str, list[int], list[str]]:
    """On a rank: three steps; in the second one rank's arithmetic is wrong ``times`` times."""
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        original = WatchedReducer._see
        left = [times]

        def see(watched: WatchedReducer, gradient: Any) -> None:
            if mesh.rank == wrong_rank and trainer.step_number == 1 and left[0]:
                left[0] -= 1
                gradient.view(-1)[0] = 1e9
            original(watched, gradient)

        WatchedReducer._see = see  # type: ignore[method-assign]
        try:
            for step in range(3):
                trainer.step(my_batches(job, mesh, step))
        except CorruptState as error:
            assert trainer.norms is not None
            return [vars(each) for each in trainer.norms.found], str(error), error.blamed, []
        finally:
            WatchedReducer._see = original  # type: ignore[method-assign]
        found = [vars(each) for each in trainer.norms.found] if trainer.norms is not None else []
        return found, "", [], checksum(trainer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_computes_something_else_once_is_named(ranks: Callable[[int], RankPool], layout: str) -> None:
    job = small_job(layout, recovery={"outlier": 50.0, "replay": True})
    for found, error, blamed, _ in ranks(2).run(train, job, 1, 1):
        assert [(each["step"], each["rank"]) for each in found] == [(2, 1)]
        assert found[0]["norm"] > 1e8 > found[0]["others"]
        assert error.startswith("in step 2 rank 1 came to other gradients the second time") and blamed == [1]


def test_an_honest_outlier_is_reported_and_changes_no_bit(ranks: Callable[[int], RankPool]) -> None:
    plain = ranks(2).run(train, small_job("dp=2 zero=1"), 0, 0)
    watched = ranks(2).run(train, small_job("dp=2 zero=1", recovery={"outlier": 1.000001, "replay": True}), 0, 0)
    assert any(found for found, *_ in watched), "hardly two norms are equal"
    assert not [error for _, error, *_ in watched if error], "computed again, it came to the same bits"
    assert [bits for *_, bits in watched] == [bits for *_, bits in plain]


def test_replaying_needs_to_know_what_is_suspect() -> None:
    with pytest.raises(InputError, match="replay = true needs outlier"):
        small_job("dp=2", recovery={"replay": True})
