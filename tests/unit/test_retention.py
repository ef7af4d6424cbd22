"""Which checkpoints stay, what is refused before it takes the place of a good one, and where a run goes on from."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_ranks import ThreadWorld, on_ranks

from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.folder import left_overs, steps, supersede_later
from meshwright.checkpoint.placed import PlacedTensor, whole
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.save import save
from meshwright.errors import InputError, SaveError
from meshwright.train.prepare import prepare_run
from tests.small_jobs import small_job


def put(folder: Path, step: int, **more: Any) -> Path:
    return save(folder, step, [whole("w", torch.full((8,), float(step)))], **more)


def test_numbers_from_900_to_1100_rotate_by_number(tmp_path: Path) -> None:
    for step in range(900, 1101, 20):
        put(tmp_path, step, keep=3)
    assert steps(tmp_path) == [1060, 1080, 1100]


def test_multiples_pinned_and_young_ones_stay(tmp_path: Path) -> None:
    rule = Retention(1, every=500, hours=1.0)
    for step in (500, 600, 700, 1000, 1100):
        path = put(tmp_path, step, keep=rule)
        if step == 600:
            (path / "pin").touch()
        if step != 1000:  # all but this one were written two hours ago
            os.utime(path / "manifest.json", times=(time.time() - 7200,) * 2)
    assert steps(tmp_path) == [500, 600, 1000, 1100], "700 is neither a multiple, nor pinned, nor young"


def test_step_0_is_no_multiple(tmp_path: Path) -> None:
    for step in (0, 10, 20):
        put(tmp_path, step, keep=Retention(1, every=10))
    assert steps(tmp_path) == [10, 20]


class SmallDisk(Disk):
    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self, path: Path) -> int:
        return self.free


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """keep=1: the old one is not removed to make room; it stays until the new one is verified."""
    put(tmp_path, 1)

    def store(world: ThreadWorld) -> str:
        part = PlacedTensor("w", (8,), (4 * world.rank,), (4,), torch.zeros(4))
        try:
            save(tmp_path, 2, [part], keep=1, world=world, disk=SmallDisk(700))
        except SaveError as error:
            return str(error)
        return ""

    said = on_ranks(2, store)
    assert said[0] == said[1] == (
        f"checkpoint: step 2 could not be saved to {tmp_path} (rank 0: {tmp_path} has 700 bytes free but the "
        "checkpoint needs 1,056; free 356 bytes there (meshwright checkpoint prune), or lower checkpoint.keep); "
        "earlier checkpoints are untouched"
    )  # fmt: skip
    assert steps(tmp_path) == [1] and not left_overs(tmp_path)
    put(tmp_path, 2, keep=1, disk=SmallDisk(1056))
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_state_that_is_not_finite_is_never_committed(tmp_path: Path, bad: float) -> None:
    """Only one rank sees it; all refuse, and the good ones stay."""
    put(tmp_path, 1, finite=True)

    def store(world: ThreadWorld) -> str:
        part = torch.zeros(4)
        part[2] = bad if world.rank == 1 else 0.0
        try:
            save(
                tmp_path, 2, [PlacedTensor("w", (8,), (4 * world.rank,), (4,), part, "exp_avg")],
                keep=1, finite=True, world=world,
            )  # fmt: skip
        except SaveError as error:
            return str(error)
        return ""

    said = on_ranks(2, store)
    assert said[0] == said[1]
    assert "(rank 1: exp_avg/w is not finite (NaN or infinity), and such a state is not saved)" in said[0]
    assert steps(tmp_path) == [1] and not left_overs(tmp_path)


def test_later_steps_are_put_aside_when_a_run_goes_on_from_an_earlier_one(tmp_path: Path) -> None:
    for step in (300, 400, 5000):
        put(tmp_path, step)
    assert supersede_later(tmp_path, 400) == [5000]
    assert steps(tmp_path) == [300, 400]
    put(tmp_path, 450, keep=1)
    assert steps(tmp_path) == [450]
    assert [path.name.rpartition("-")[0] for path in left_overs(tmp_path)] == [".step-5000.superseded"]


def test_a_run_is_told_from_where_to_go_on(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some words of text " * 200)
    job = small_job(
        "dp=1", data={"train": [str(corpus)], "cache": str(tmp_path / "cache")}, model={"vocabulary": 257},
        cluster={"device": "cpu"},
    )  # fmt: skip
    run = tmp_path / "run"
    with pytest.raises(InputError, match="--from-step: 4 is of a run that goes on; give --resume too"):
        prepare_run(job, run, resume=False, from_step=4)
    prepare_run(job, run, resume=False)
    for step in (4, 8, 12):
        put(run / "checkpoints", step, optimizer={"name": "sgd"})
    with pytest.raises(InputError, match=r"has no complete checkpoint of step 5; use one of 4, 8, 12"):
        prepare_run(job, run, resume=True, from_step=5)
    assert steps(run / "checkpoints") == [4, 8, 12]
    prepare_run(job, run, resume=True, from_step=8)
    assert steps(run / "checkpoints") == [4, 8]


def test_a_run_whose_checkpoints_do_not_fit_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some words of text " * 200)
    job = small_job(
        "dp=1", data={"train": [str(corpus)], "cache": str(tmp_path / "cache")}, model={"vocabulary": 257},
        cluster={"device": "cpu"}, checkpoint={"every": 5, "keep": 2}, optimizer={"name": "adamw"},
    )  # fmt: skip
    each = 24 * job.model_spec.parameter_count
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3 * each - 1})())
    with pytest.raises(InputError) as error:
        prepare_run(job, tmp_path / "run", resume=False)
    assert str(error.value).startswith(
        f"--out: {tmp_path / 'run'} has {3 * each - 1:,} bytes free but 3 checkpoints of {each:,} bytes need "
        f"{3 * each:,}"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3 * each})())
    prepare_run(job, tmp_path / "run", resume=False)
