"""Steps on shared processor cores: what the model must satisfy whatever the machine."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.job.cluster import ClusterSpec
from meshwright.job.job import Job, job_from_values
from meshwright.plan.arrays import Layouts, Work, from_layouts
from meshwright.plan.evaluate import evaluate
from meshwright.plan.measured import MeasuredCollectives
from meshwright.plan.place import Place
from meshwright.plan.spends import predicted_spends
from meshwright.plan.traffic import traffic
from tests.unit.test_calibrate import CLUSTER


def job(layout: str, batch: int = 8) -> Job:
    return job_from_values(
        {
            "model": {"vocabulary": 512, "hidden": 128, "layers": 8, "heads": 4, "ffn_hidden": 384},
            "data": {"sequence_length": 128, "train": "made up"},
            "batch": {"global_size": batch},
            "layout": layout,
            "cluster": {"device": "cpu"},
        }
    ).resolve()


def step(layout: str, cluster: ClusterSpec = CLUSTER) -> float:
    one = job(layout)
    work = Work.of(one)
    return float(evaluate(work, cluster, from_layouts([one.layout], work)).step_time[0])


def cores(count: int) -> ClusterSpec:
    assert CLUSTER.host is not None
    return CLUSTER.model_copy(update={"host": CLUSTER.host.model_copy(update={"cores": count}), "contention": {1: 1.0}})


LAYOUTS = (
    "micro_batch=2", "dp=2 micro_batch=2", "dp=2 zero=1 micro_batch=2", "dp=2 zero=2 micro_batch=2",
    "dp=4 zero=3 micro_batch=1", "tp=2 micro_batch=4", "tp=4 micro_batch=4", "pp=2 micro_batch=1", "pp=4 micro_batch=1",
    "pp=2 schedule=interleaved micro_batch=1", "pp=2 schedule=zbv micro_batch=1", "dp=2 tp=2 micro_batch=2",
    "dp=2 pp=2 micro_batch=1", "tp=2 pp=2 micro_batch=2", "dp=2 recompute=full micro_batch=2",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_sum_to_the_step_and_none_is_negative(layout: str) -> None:
    one = job(layout)
    work = Work.of(one)
    answer = evaluate(work, CLUSTER, from_layouts([one.layout], work))
    parts = [float(part[0]) for part in answer.time.values()]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(float(answer.step_time[0]))
    for rank in range(one.layout.ranks):
        spends = predicted_spends(one, CLUSTER, rank)
        assert spends.sum == pytest.approx(spends.wall)
        assert spends.wall == pytest.approx(float(answer.step_time[0]))


def test_ranks_beyond_the_cores_take_turns() -> None:
    assert step("dp=2 micro_batch=2", cores(2)) < 0.65 * step("micro_batch=2", cores(2))
    assert step("dp=4 micro_batch=2", cores(2)) > 0.95 * step("dp=2 micro_batch=2", cores(2))
    assert step("dp=4 micro_batch=2", cores(4)) < 0.65 * step("dp=4 micro_batch=2", cores(2))


def test_other_ranks_fill_the_bubble_of_a_pipeline_on_shared_cores() -> None:
    def bubble(layout: str, count: int) -> float:
        one = job(layout)
        work = Work.of(one)
        return float(evaluate(work, cores(count), from_layouts([one.layout], work)).time["bubble"][0])

    alone, shared = bubble("pp=4 micro_batch=2", 4), bubble("pp=4 micro_batch=2", 2)
    assert shared < 0.5 * alone
    assert step("pp=4 micro_batch=2", cores(2)) > step("pp=4 micro_batch=2", cores(4))


def test_recomputation_and_more_micro_batches_cost_time() -> None:
    assert step("dp=2 recompute=full micro_batch=2") > 1.2 * step("dp=2 micro_batch=2")
    assert step("dp=2 micro_batch=1") > step("dp=2 micro_batch=4")


def test_columns_are_independent_of_one_another() -> None:
    """A layout's time does not depend on what else is evaluated with it."""
    jobs = [job(layout) for layout in LAYOUTS]
    work = Work.of(jobs[0])
    together = evaluate(work, CLUSTER, from_layouts([one.layout for one in jobs], work)).step_time
    assert together == pytest.approx([step(layout) for layout in LAYOUTS])


def test_between_measured_points_seconds_are_interpolated() -> None:
    measured = MeasuredCollectives(CLUSTER)

    def seconds(size: int, payload: float, groups: int = 1) -> float:
        return float(measured.seconds("all_gather", "intra", np.array([size]), np.array([groups]), payload)[0])

    assert seconds(1, 1e6) == 0
    assert seconds(2, 64) == pytest.approx(2e-4)
    assert seconds(2, (64 + 65536) / 2) == pytest.approx(2.5e-4)
    assert seconds(2, 3 * 4194304) == pytest.approx(24e-3)
    assert seconds(3, 4194304) == pytest.approx(12e-3)
    assert seconds(8, 64) == pytest.approx(2e-4 * 7 / 3), "nearest measured group, with more peers"
    assert measured.has("intra") and not measured.has("inter")


def test_a_large_array_of_layouts_is_quick() -> None:
    work = Work.of(job("micro_batch=2"))
    many = Layouts.make(dp=np.full(20_000, 2), micro_batch=2, micro_batches=2)
    assert len(evaluate(work, CLUSTER, many)) == 20_000


def counting(operation: str, ranks: int) -> ClusterSpec:
    """A machine on which each call of one operation takes a second, and of the others nothing."""
    calls = tuple(
        one.model_copy(update={"alpha": float(one.operation == operation), "beta": 0.0, "points": ()})
        for one in CLUSTER.collectives
    )
    return cores(ranks).model_copy(update={"collectives": calls})


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    "layout",
    ["tp=2 micro_batch=4", "tp=4 micro_batch=2", "tp=2 recompute=full micro_batch=4", "dp=2 micro_batch=2",
     "dp=2 zero=1 micro_batch=2", "dp=2 zero=2 micro_batch=2", "dp=2 zero=3 micro_batch=2", "dp=4 zero=3"],
)  # fmt: skip
def test_the_calls_it_pays_for_are_those_of_the_predicted_ledger(layout: str, operation: str) -> None:
    one = job(layout)
    work = Work.of(one)
    values = evaluate(work, counting(operation, one.layout.ranks), from_layouts([one.layout], work)).time
    found = sum(sent.messages for sent in traffic(one, Place(one, 0)) if sent.operation == operation)
    counted = sum(float(values[axis][0]) for axis in ("tp", "shard", "replicate"))
    assert found - 1e-6 <= counted <= found + 0.6, "the hooks of ZeRO-2 and 3 stand beside the calls"
