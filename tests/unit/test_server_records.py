"""What a parameter-server run writes down while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.progress import StepProgress
from meshwright.sync.server.modes import Work
from meshwright.sync.server.update import Update
from meshwright.train.servers.records import RunRecords
from tests.small_jobs import small_job

FACT = {"version": 0, "versions": [0], "losses": [1.0], "valid": 8}


@pytest.mark.parametrize("name", ["updates", "metrics", "events"])
def test_a_record_that_cannot_be_written_ends_the_run_and_not_the_call(tmp_path: Path, name: str) -> None:
    job, corpora = small_job("dp=2", sync={"strategy": "server"}), None
    progress = StepProgress(6, 0, shown=False)
    records = RunRecords(job, tmp_path, corpora, begin=0, progress=progress, resumed=False)  # type: ignore[arg-type]
    file: Any = getattr(records, name)
    file._file.close()
    work = Work(0, 0, 8, 0, 1, whole=True)
    with Path("/dev/full").open("a", buffering=1) as file._file:
        records.update(Update(1, [("worker-0", 1)], (work,), [FACT], norm=1.0, rate=0.1, factor=1.0), 1.0)
        records.event("worker-joined", worker="worker-0")
        records.close()
    assert isinstance(records.error, OSError)
    assert records.error.filename == str(tmp_path / f"{name}.jsonl") and records.error.strerror is not None
