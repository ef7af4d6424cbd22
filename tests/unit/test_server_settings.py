"""What a job says of its optimizer and parameter servers reaches updates, the launcher and the checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.prove.parity import parameter_difference
from meshwright.prove.server_run import rehearse
from meshwright.sync.server.cursor import Position
from meshwright.train.servers import records, run
from meshwright.train.servers.run import Begin, make_plan
from tests.small_jobs import SCHEDULED, one_device, request, small_job

SERVER = {"strategy": "server", "servers": 2}


def test_a_schedule_and_other_betas_give_the_update_of_one_device() -> None:
    job = small_job("dp=2 micro_batch=4", sync=SERVER, optimizer=SCHEDULED)
    (found, _), expected = rehearse(request(job, 5)), one_device(job, 5)
    difference, where = parameter_difference(found.parameters, expected.parameters, scale=5 * job.optimizer.lr)
    assert difference < 1e-10, where


def test_the_plan_has_the_rule_for_stale_pushes() -> None:
    sync = {**SERVER, "server_mode": "asynchronous", "stale_rate": "inverse"}
    assert make_plan(small_job("dp=2", sync=sync), Begin()).staleness == "inverse"


def test_so_many_processes_are_started_again_as_the_job_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []
    monkeypatch.setattr(run._Supervisor, "_start", lambda self, role, index: started.append((role, index)))
    job = small_job("dp=2", sync={**SERVER, "server_restarts": 2})
    notes: Any = SimpleNamespace(event=lambda kind, **facts: None)
    supervisor = run._Supervisor(job, tmp_path, Begin(), notes)
    supervisor.logs = tmp_path
    supervisor.node = SimpleNamespace(act=lambda call: None)  # type: ignore[assignment]
    supervisor.coordinator = SimpleNamespace(failure=None, awaits=lambda role: False)  # type: ignore[assignment]
    for number in range(4):
        (tmp_path / "log").touch()
        process: Any = SimpleNamespace(returncode=-9)
        supervisor._ended(run._Child(f"worker-1.{number}", "worker", 1, number, process, tmp_path / "log"))
    assert started == [("worker", 1)] * 2


@pytest.fixture
def drilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of which a checkpoint was to be loaded by another process."""
    found: list[int] = []

    def save(folder: Path, step: int, tensors: list[Any], *, drill: bool, **more: Any) -> None:
        found.extend([step] if drill else [])

    monkeypatch.setattr(records, "save", save)
    return found


def test_every_so_many_checkpoints_are_drilled(tmp_path: Path, drilled: list[int]) -> None:
    job = small_job("dp=2", sync=SERVER, checkpoint={"every": 5, "drill_every": 2})
    corpora: Any = SimpleNamespace(training=range(100), validation=None)
    say: Callable[..., None] = lambda *words, **more: None  # noqa: E731
    progress: Any = SimpleNamespace(say=say, update=say)
    notes = records.RunRecords(job, tmp_path, corpora, begin=0, progress=progress, resumed=False)
    for step in (5, 10, 15, 20):
        notes.save(step, [], step, Position(10 * step))
    notes.close()
    assert notes.error is None and drilled == [10, 20]
