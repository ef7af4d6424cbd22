"""Saving while training goes on: the step's own values, flat memory, no failure lost; and when to save."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest
import torch

from meshwright.checkpoint.compare import compare_checkpoints
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.drill import restore
from meshwright.checkpoint.folder import steps
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.placed import whole
from meshwright.checkpoint.save import save
from meshwright.checkpoint.world import Alone
from meshwright.comm.mesh import Mesh
from meshwright.errors import DamagedCheckpoint, InputError, SaveError
from meshwright.job.job import Job
from meshwright.job.sections import CheckpointSection
from meshwright.plan import goodput
from meshwright.prove.pool import RankPool
from meshwright.train.background_save import BackgroundSaver, Written
from meshwright.train.cadence import Cadence, young_interval
from meshwright.train.loop import TrainingLoop
from meshwright.train.saving import Saver
from meshwright.train.trainer import Trainer
from tests.small_jobs import my_batches, small_job

Ranks = Callable[[int], RankPool]
ADAMW = {"optimizer": {"name": "adamw", "lr": 0.01}}


class SlowDisk(Disk):
    """Training has long gone on when the bytes are written."""

    def create(self, path: Path) -> BinaryIO:
        time.sleep(0.5)
        return super().create(path)


class FullDisk(Disk):
    """Full while ``full`` says so."""

    full = True

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", file.name)
        super().write(file, data)


def train_on_while_writing(job: Job, folder: str) -> tuple[int, bool]:
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        plain, saver = Saver(trainer, None, Path(folder) / "plain"), Saver(trainer, None, Path(folder) / "late")
        saver.disk = SlowDisk()
        background = BackgroundSaver(saver)
        trainer.step(my_batches(job, mesh, 0))
        plain.save()
        background.begin()
        for step in range(1, 4):
            trainer.step(my_batches(job, mesh, step))
        still = background.take(wait=False) is None
        written = background.take(wait=True)
        background.close()
        assert isinstance(written, Written) and background.take(wait=True) is None
        return written.step, still


@pytest.mark.parametrize("layout", ["dp=2 zero=1", "tp=2"])
def test_what_is_written_is_the_state_of_its_step(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    outcomes = ranks(2).run(train_on_while_writing, small_job(layout, **ADAMW), str(tmp_path))
    assert outcomes == [(1, True)] * 2, "it was still being written after three more steps"
    a, b = (tmp_path / name / "checkpoints" / "step-1" for name in ("plain", "late"))
    found = compare_checkpoints(a, b)
    assert found.same_tensors and not found.facts


def save_again_and_again(job: Job, folder: str, count: int) -> list[int]:
    process = psutil.Process()
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        background = BackgroundSaver(Saver(trainer, None, Path(folder)))
        held = []
        for _ in range(count):
            trainer.step_number += 1
            background.begin()
            assert isinstance(background.take(wait=True), Written)
            held.append(process.memory_info().rss)
        background.close()
    return held


def test_memory_is_flat_over_fifty_saves(ranks: Ranks, tmp_path: Path) -> None:
    """A state of 20 MB: one more copy kept at each save would be a gigabyte at the end."""
    job = small_job("dp=1", model={"hidden": 128, "ffn_hidden": 512, "layers": 4}, **ADAMW)
    (held,) = ranks(1).run(save_again_and_again, job, str(tmp_path), 50)
    assert max(held[10:]) - held[10] < 15e6, held
    assert steps(tmp_path / "checkpoints") == [49, 50]


def fail_and_go_on(job: Job, folder: str) -> tuple[str, int, int]:
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        saver = Saver(trainer, None, Path(folder))
        background = BackgroundSaver(saver)
        trainer.step(my_batches(job, mesh, 0))
        saver.disk = disk = FullDisk()
        disk.full = mesh.coordinate("world") == 1
        background.begin()
        failed = background.take(wait=True)
        before = saver.saved_step
        disk.full = False
        background.begin()
        background.take(wait=True)
        background.close()
        return str(failed), before, saver.saved_step


def test_a_failure_of_one_rank_is_told_to_all_and_the_next_save_works(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(2).run(fail_and_go_on, small_job("dp=2 zero=1"), str(tmp_path))
    assert said[0] == said[1]
    assert "rank 1: " in said[0][0] and "No space left on device" in said[0][0]
    assert said[0][1:] == (0, 1) and steps(tmp_path / "checkpoints") == [1]


# --- the loop ------------------------------------------------------------------------------------


def loop_on_rank(job: Job, folder: str, full_at: int | None) -> str:
    """Run the training loop; the disk is full for the save of step ``full_at``."""
    with Mesh(job.layout) as mesh:
        loop = TrainingLoop(job, mesh, Path(folder), device=torch.device("cpu"), resume=False, quiet=True)
        loop.saver.disk = disk = FullDisk()
        disk.full = False
        write = loop.saver.write

        def written(step: int, *rest: Any) -> Path:
            disk.full = step == full_at
            return write(step, *rest)

        loop.saver.write = written  # type: ignore[method-assign]
        try:
            loop.run()
        except SaveError as error:
            return str(error)
        return ""


def loop_job(tmp_path: Path, **checkpoint: Any) -> Job:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some words of text " * 400)
    return small_job(
        "dp=2 zero=1", model={"vocabulary": 257}, train={"steps": 8}, observe={"one_device_steps": 0},
        data={"train": [str(corpus)], "cache": str(tmp_path / "cache")}, checkpoint={"mode": "async", **checkpoint},
    )  # fmt: skip


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("failure", [None, "stop", "continue"])
def test_the_loop_saves_in_the_background_and_loses_no_failure(
    ranks: Ranks, tmp_path: Path, failure: str | None
) -> None:
    job = loop_job(tmp_path, every=2, keep=9, failure=failure or "stop")
    run = tmp_path / "run"
    run.mkdir()
    said = ranks(2).run(loop_on_rank, job, str(run), None if failure is None else 4)
    happened = events(run)
    saved = [event["step"] for event in happened if event["event"] == "saved"]
    assert said[0] == said[1]
    if failure is None:
        assert said[0] == "" and saved == [2, 4, 6, 8] == steps(run / "checkpoints")
        assert all(event["stall_seconds"] >= 0 for event in happened if event["event"] == "saving")
        return
    assert ["No space left" in event["reason"] for event in happened if event["event"] == "save-failed"] == [True]
    assert saved == steps(run / "checkpoints")
    if failure == "continue":
        assert said[0] == "" and saved == [2, 6, 8]
    else:  # the state at which the ranks agreed to stop is saved, and the failure is what the run ends with
        assert "step 4 could not be saved" in said[0] and saved[0] == 2 and 4 < saved[-1] <= 8


# --- when ----------------------------------------------------------------------------------------


def section(**values: Any) -> CheckpointSection:
    return CheckpointSection(**values)


def test_a_checkpoint_is_due_by_steps_or_by_time() -> None:
    now = [0.0]
    cadence = Cadence(section(every=10, interval=30), Alone(), lambda: now[0])
    assert [step for step in range(1, 31) if cadence.due(step)] == [10, 20, 30]
    now[0] = 31.0
    assert cadence.due(7)
    cadence.saved(2.0)
    assert not cadence.due(8)
    assert not Cadence(section(), Alone()).due(10)


def test_the_automatic_interval_is_youngs_of_the_measured_cost() -> None:
    now = [0.0]
    cadence = Cadence(section(interval="auto", mtbf_hours=3.0), Alone(), lambda: now[0])
    assert cadence.interval == 60.0
    for cost in (30.0, 500.0, 30.0):  # one slow write does not move the median
        cadence.saved(cost)
    assert cadence.interval == pytest.approx(805, abs=1), "30 s and 3 h: 805 s"
    assert young_interval(30.0, 10800.0) == pytest.approx(goodput.young_interval(30.0, 10800.0))
    now[0] = 800.0
    assert not cadence.due(1)
    now[0] = 806.0
    assert cadence.due(1)


def test_automatic_needs_to_know_how_often_the_run_fails() -> None:
    with pytest.raises(InputError, match="needs mtbf_hours"):
        small_job("dp=1", checkpoint={"interval": "auto"})


# --- restore drill -------------------------------------------------------------------------------


def test_the_drill_loads_what_was_saved(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [whole("w", torch.randn(30, 7)), whole("s", torch.tensor(3.0))], drill=True)
    assert restore(path) == 2


def test_a_checkpoint_that_fails_the_drill_takes_no_other_ones_place(tmp_path: Path) -> None:
    class Flips(Disk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.name == "step-2":
                place = read_manifest(target).tensors["parameter/w"].slices[0]
                data = bytearray((target / place.file).read_bytes())
                data[place.begin] ^= 1
                (target / place.file).write_bytes(data)

    save(tmp_path, 1, [whole("w", torch.zeros(30))])
    with pytest.raises(SaveError, match=r"the restore drill of .*step-2 failed: .*rank-00000\.safetensors is damaged"):
        save(tmp_path, 2, [whole("w", torch.ones(30))], drill=True, keep=1, disk=Flips())
    assert steps(tmp_path) == [1, 2]
    with pytest.raises(DamagedCheckpoint):
        restore(tmp_path / "step-2")
    assert os.listdir(tmp_path / "step-1")
