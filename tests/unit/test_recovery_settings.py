"""What ``[recovery]`` says of starting ranks and of slow ones reaches the supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.recovery import supervise
from meshwright.recovery.generation import Plan
from meshwright.recovery.supervise import Supervisor
from meshwright.recovery.units import Start
from tests.small_jobs import small_job


class NoUnits:
    """In place of the ranks' processes: starts none."""

    def start(self, starts: Sequence[Start]) -> None:
        return


def planned(folder: Path, job: Job) -> Plan:
    return Plan(
        run_directory=folder, ranks=2, module="none", arguments=[], port=1, grace_seconds=1.0, environment={},
        section=job.recovery, job=job,
    )  # fmt: skip


@pytest.mark.parametrize(("start", "kind"), [("warm", "WarmUnits"), ("cold", "ColdUnits")])
def test_ranks_start_warm_or_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, kind: str) -> None:
    def named(name: str) -> Any:
        def refuse(module: str, environment: Any) -> None:
            raise InputError(name)

        return refuse

    for name in ("WarmUnits", "ColdUnits"):
        monkeypatch.setattr(supervise, name, named(name))
    job = small_job("dp=2", recovery={"start": start})
    with pytest.raises(InputError, match=kind):
        Supervisor(planned(tmp_path, job)).run()


def test_a_rank_is_slow_by_the_score_and_the_steps_of_the_job(tmp_path: Path) -> None:
    """0.77 of the speed of the other is slow here, after two steps."""
    job = small_job("dp=2", recovery={"straggler_steps": 2, "straggler_score": 0.8})
    supervisor = Supervisor(planned(tmp_path, job))
    supervisor._units = NoUnits()  # type: ignore[assignment]
    supervisor._start([], 2)
    for step in (1, 2):
        assert not supervisor._stragglers.new_ones()
        supervisor._stragglers.step(0, step, 1.0)
        supervisor._stragglers.step(1, step, 1.3)
    assert [slow.rank for slow in supervisor._stragglers.new_ones()] == [1]
    for memory in supervisor._memories:
        memory.close()
