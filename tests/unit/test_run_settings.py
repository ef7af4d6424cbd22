"""What a job says of a run's updates, records and checkpoints is what it does: one rank, in this process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.folder import steps
from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job, load_job
from meshwright.prove.layout_run import train_on_rank
from meshwright.prove.parity import assemble, parameter_difference
from meshwright.train import report, sampling, saving
from meshwright.train.build import build_stages
from meshwright.train.loop import TrainingLoop
from meshwright.train.servers.compute import join_alone
from meshwright.train.trainer import Trainer
from tests.command_line import write_job
from tests.small_jobs import SCHEDULED, one_device, request, small_job

CPU = torch.device("cpu")
SMALL = ("model.layers=1", "model.hidden=16")


def job_in(folder: Path, *settings: str) -> Job:
    """The job of a tiny model on one rank."""
    return load_job(write_job(folder), [*SMALL, *settings], "dp=1 micro_batch=4").resolve()


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    join_alone()
    yield
    dist.destroy_process_group()


class Board:
    """In place of ``SummaryWriter``, which takes seconds to load."""

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.closed = folder, list[tuple[str, float, int]](), False
        boards.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


boards: list[Board] = []


@dataclass
class Run:
    """A finished run of six steps, each of them saved."""

    job: Job
    folder: Path
    copy: Path
    drilled: list[int]
    """Steps whose checkpoint another process was to load."""


@pytest.fixture(scope="module")
def run(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With all checkpoints but that of the first step written two hours ago."""
    root = tmp_path_factory.mktemp("settings")
    folder, copy, drilled = root / "run", root / "copy", list[int]()
    folder.mkdir()

    def save(checkpoints: Path, step: int, tensors: Any, *, drill: bool, **more: Any) -> Path:
        drilled.extend([step] if drill else [])
        path = original(checkpoints, step, tensors, **more)
        if step > 1:
            os.utime(path / "manifest.json", times=(time.time() - 7200,) * 2)
        return path

    original = saving.save
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Board
    job = job_in(
        root, "checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=4", "checkpoint.keep_hours=1",
        "checkpoint.drill_every=3", f"checkpoint.copy_to=file://{copy}", "observe.tensorboard=true",
        "observe.ledger_step=2", "observe.sample_prompt=To", "observe.sample_tokens=5",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, Mesh(job.layout) as mesh:
        patch.setattr(saving, "save", save)
        patch.setattr(TrainingLoop, "_install_signals", lambda self: None)
        patch.setitem(sys.modules, "torch.utils.tensorboard", module)
        loop = TrainingLoop(job, mesh, folder, device=CPU, resume=False, quiet=True)
        loop.run()
    for records in (loop.metrics, loop.events):  # which otherwise end with the process
        assert records is not None
        records.close()
    return Run(job, folder, copy, drilled)


def test_young_checkpoints_and_multiples_stay(run: Run) -> None:
    assert steps(run.folder / "checkpoints") == [1, 4, 6]


def test_every_third_checkpoint_is_drilled(run: Run) -> None:
    assert run.drilled == [3, 6]


def test_checkpoints_are_copied_and_the_newest_copy_stays(run: Run) -> None:
    assert steps(run.copy) == [6]


def test_scalars_go_to_tensorboard(run: Run) -> None:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    (board,) = boards
    assert board.folder == str(run.folder / "tensorboard") and board.closed
    losses = [(value, step) for name, value, step in board.scalars if name == "loss"]
    assert losses == [(row["loss"], row["step"]) for row in rows]
    assert "applied" not in {name for name, _, _ in board.scalars}, "which is no number"


def test_the_ledger_is_of_the_step_that_the_job_names(run: Run) -> None:
    """The second is counted, and the one after it timed."""
    assert json.loads((run.folder / "ledger.json").read_text())["step"] == 3


def test_a_sample_has_as_many_tokens_as_the_job_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def letters(model: Any, prompt: list[int], *, tokens: int, window: int) -> list[int]:
        return [*b"a"] * tokens

    monkeypatch.setattr(sampling, "continue_prompt", letters)
    assert report.finish_report(run.job, run.folder, quiet=True)["sample"] == "aaaaa"


def test_layers_are_compiled_where_the_job_says_so(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    for wanted in ("false", "true"):
        job = job_in(tmp_path, f"train.compile={wanted}", "model.layers=2")
        with Mesh(job.layout) as mesh:
            (stage,) = build_stages(job, mesh, CPU).values()
        assert compiled == (list(stage.layers.values()) if wanted == "true" else [])


def test_the_loss_scale_grows_after_as_many_steps_as_the_job_says(alone: None, tmp_path: Path) -> None:
    half = ("precision.dtype=float16", "precision.loss_scale_initial=8", "precision.loss_scale_growth_interval=2")
    job = job_in(tmp_path, *half)
    with Mesh(job.layout) as mesh:
        scale = Trainer(job, mesh).loss_scale
    scale.update(finite=True)
    assert scale.value == 8
    scale.update(finite=True)
    assert scale.value == 16


def test_a_schedule_and_other_betas_give_the_update_of_one_device(alone: None) -> None:
    job = small_job("dp=1 micro_batch=4", optimizer=SCHEDULED)
    found, expected = train_on_rank(request(job, 5)), one_device(job, 5)
    parameters = assemble([found.parameters])
    difference, where = parameter_difference(parameters, expected.parameters, scale=5 * job.optimizer.lr)
    assert difference < 1e-10, where
