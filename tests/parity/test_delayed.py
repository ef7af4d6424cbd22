"""PipeDream-2BW against the recursion it stands for: ``W_{t+1} = W_t - update(gradient at W_{t-1})``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.prove.layout_run import Box, boxes
from meshwright.prove.parity import Arrays, assemble
from meshwright.prove.pool import RankPool
from meshwright.train.delayed import DelayedTrainer, make_trainer
from meshwright.train.saving import Saver
from meshwright.train.trainer import StepReport
from meshwright.train.worker import prepare_determinism
from tests.delayed_recursion import recursion, spoil
from tests.small_jobs import my_batches, run, small_job, train_and_save

STEPS = 5
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "clip_norm": 0.2}
ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}
Pools = Callable[[int], RankPool]


def job_of(layout: str, optimizer: dict[str, object], **train: object) -> Job:
    size = 16 if "dp=2" in layout else 8
    return small_job(layout, optimizer=optimizer, batch={"global_size": size}, train={"deterministic": True, **train})


def same(found: Arrays, expected: Arrays) -> bool:
    return all(np.array_equal(found[name], value) for name, value in expected.items())


CASES = [
    ("pp=2 schedule=2bw micro_batch=1", "micro_batch=1", SGD),
    ("pp=4 schedule=2bw micro_batch=1", "micro_batch=1", ADAMW),
    ("dp=2 pp=2 schedule=2bw micro_batch=2 zero=1", "dp=2 micro_batch=2", SGD),
]
MORE = [
    ("pp=2 schedule=2bw micro_batch=1", "micro_batch=1", ADAMW),
    ("pp=4 schedule=2bw micro_batch=1", "micro_batch=1", SGD),
    ("pp=4 schedule=2bw micro_batch=2", "micro_batch=2", SGD),
    ("dp=2 pp=2 schedule=2bw micro_batch=2", "dp=2 micro_batch=2", ADAMW),
    ("tp=2 pp=2 schedule=2bw micro_batch=1", "tp=2 micro_batch=1", SGD),
    ("pp=2 schedule=2bw micro_batch=2 recompute=full", "micro_batch=2", ADAMW),
    ("pp=2 schedule=2bw micro_batch=2 stages=3,1 recompute=selective,none", "micro_batch=2", SGD),
]


@pytest.mark.parametrize(
    ("layout", "plain", "optimizer"), [*CASES, *(pytest.param(*case, marks=pytest.mark.all) for case in MORE)]
)
def test_two_versions_follow_the_recursion_bit_for_bit(
    ranks: Pools, layout: str, plain: str, optimizer: dict[str, object]
) -> None:
    found = run(ranks, job_of(layout, optimizer), STEPS)
    expected = recursion(ranks, job_of(plain, optimizer), STEPS)
    assert same(found.parameters, expected.parameters)
    assert (found.losses, found.norms) == (expected.losses, expected.norms)


@dataclass
class Leg:
    """What a rank does: steps ``start`` to ``stop``, drained and saved after some, one with infinite gradients."""

    job: Job
    folder: Path
    start: int
    stop: int
    saves: tuple[int, ...] = ()
    bad_step: int | None = None


Ran = tuple[list[StepReport], list[Box], list[Box]]


def on_rank(leg: Leg) -> Ran:
    """Reports, and newest and previous parameters."""
    prepare_determinism(leg.job)
    reports: list[StepReport] = []
    with Mesh(leg.job.layout) as mesh:
        trainer = make_trainer(leg.job, mesh)
        assert isinstance(trainer, DelayedTrainer)
        spoil(trainer, leg.bad_step)
        saver = Saver(trainer, None, leg.folder)
        if leg.start:
            saver.resume()
        under_way = 0
        for step in range(leg.start, leg.stop):
            drain = step + 1 in (*leg.saves, leg.stop)
            ended = trainer.advance(my_batches(leg.job, mesh, step), drain=drain)
            # A step ends while the next one runs, unless the pipeline is drained: they really overlap.
            assert len(ended) == under_way + drain
            under_way = not drain
            reports += ended
            if not all(report.applied for report in ended) and leg.job.train.nonfinite == "stop":
                trainer.abandon()
                break
            if step + 1 in leg.saves:
                saver.save()
        newest = boxes(trainer, trainer.owned, lambda piece: piece.master)
        masters = dict(zip(map(id, trainer.owned), trainer.previous, strict=True))
        return reports, newest, boxes(trainer, trainer.owned, lambda piece: masters[id(piece)])


def run_leg(ranks: Pools, leg: Leg) -> tuple[list[StepReport], Arrays, Arrays]:
    ran: list[Ran] = ranks(leg.job.layout.ranks).run(on_rank, leg)
    assert all(str(one[0]) == str(ran[0][0]) for one in ran)  # a norm may be NaN
    return ran[0][0], assemble([one[1] for one in ran]), assemble([one[2] for one in ran])


LAYOUT = "pp=2 schedule=2bw micro_batch=1"


@pytest.mark.parametrize(
    "layout", [LAYOUT, pytest.param("dp=2 pp=2 zero=1 schedule=2bw micro_batch=2", marks=pytest.mark.all)]
)
def test_draining_and_resuming_change_no_bit(ranks: Pools, tmp_path: Path, layout: str) -> None:
    job = job_of(layout, ADAMW)
    reports, newest, previous = run_leg(ranks, Leg(job, tmp_path / "whole", 0, 7))
    first, *_ = run_leg(ranks, Leg(job, tmp_path / "parts", 0, 5, saves=(2, 4)))
    rest, resumed, resumed_previous = run_leg(ranks, Leg(job, tmp_path / "parts", 4, 7))
    assert first[:4] + rest == reports
    assert same(resumed, newest)
    assert same(resumed_previous, previous)
    assert not same(previous, newest)


def test_checkpoints_go_to_and_from_other_schedules(ranks: Pools, tmp_path: Path) -> None:
    """Another schedule takes the newest parameters; from its checkpoint both versions start alike."""
    delayed, plain = job_of(LAYOUT, ADAMW), job_of("pp=2 micro_batch=1", ADAMW)
    _, newest, _ = run_leg(ranks, Leg(delayed, tmp_path / "there", 0, 2, saves=(2,)))
    taken = assemble(ranks(2).run(restored, plain, str(tmp_path / "there")))
    assert same(taken, newest)
    ranks(2).run(train_and_save, plain, str(tmp_path / "back"), 0, 2, (2,))
    begun = assemble(ranks(2).run(restored, plain, str(tmp_path / "back")))
    reports, *_ = run_leg(ranks, Leg(delayed, tmp_path / "back", 2, 4))
    plain_reports = ranks(2).run(train_and_save, plain, str(tmp_path / "back"), 2, 3, ())[0]
    assert reports[0] == plain_reports[0]  # the same parameters, the same gradient
    assert not same(begun, newest)


def restored(job: Job, folder: str) -> list[Box]:
    """On a rank: the parameters of the last checkpoint."""
    with Mesh(job.layout) as mesh:
        trainer = make_trainer(job, mesh)
        Saver(trainer, None, Path(folder)).resume()
        return boxes(trainer, trainer.owned, lambda piece: piece.master)


def test_a_step_that_is_not_finite_is_skipped_or_stops_what_is_under_way(ranks: Pools, tmp_path: Path) -> None:
    skipping, stopping = (job_of(LAYOUT, SGD, nonfinite=policy) for policy in ("skip", "stop"))
    reports, newest, _ = run_leg(ranks, Leg(skipping, tmp_path, 0, STEPS, bad_step=2))
    assert [report.applied for report in reports] == [True, True, False, True, True]
    expected = recursion(ranks, job_of("micro_batch=1", SGD, nonfinite="skip"), STEPS, bad_step=2)
    assert same(newest, expected.parameters)
    reports, newest, previous = run_leg(ranks, Leg(stopping, tmp_path, 0, STEPS, bad_step=2))
    assert [report.applied for report in reports] == [True, True, False]
    _, before, before_previous = run_leg(ranks, Leg(stopping, tmp_path, 0, 2))
    assert same(newest, before) and same(previous, before_previous)
