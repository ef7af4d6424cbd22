"""What the comparison over a slow link makes of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.slow_link import ALONE, PLAIN, STRATEGIES, Run, Strategy, crossing, read, row
from meshwright.job.job import load_job


def test_time_to_a_loss_lies_between_two_validations() -> None:
    run = Run([1.0, 3.0, 4.0, 8.0], [(2, 5.0), (4, 4.0)], [], 0, None)
    assert run.steps_to(4.5) == 3.0
    assert run.seconds_to(4.5) == 4.0
    assert run.seconds_to(4.75) == pytest.approx(3.5)
    assert run.steps_to(5.5) == 2.0
    assert run.seconds_to(3.9) is None
    figures = row(run, 4.5, plain_seconds=10.0, compute_seconds=2.0)
    assert figures["closed"] == 0.75
    assert figures["times_faster"] == 2.5


def test_what_crosses_between_two_hosts_of_two_ranks(tmp_path: Path) -> None:
    ledger = {"ranks": [{"sends": [{"wire": 30}, {"wire": 60}]}] * 4}
    assert crossing(ledger, PLAIN, 10) == 10 * 4 * 90 * 2 / 3  # two of a rank's three peers are on the other host
    assert crossing(ledger, ALONE, 10) is None
    lines = [{"step": 1, "step_seconds": 2.0, "loss": 5.0}, {"step": 1, "validation_loss": 5.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "ledger.json").write_text(json.dumps(ledger))
    run = read(tmp_path, PLAIN, 1, 250)
    assert (run.seconds, run.validation, run.losses) == ([2.0], [(1, 5.5)], [5.0])
    assert row(run, 5.5, 2.0, 1.0)["link_over_ledger"] == pytest.approx(250 / 240)


@pytest.mark.parametrize("strategy", [PLAIN, ALONE, *STRATEGIES], ids=lambda strategy: strategy.name)
def test_every_strategy_is_a_job(tmp_path: Path, strategy: Strategy) -> None:
    text = Path("examples/quickstart.toml").read_text(encoding="utf-8").replace("clip_norm = 1.0\n", "")
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    job = load_job(path, strategy.settings(300), "dp=4").resolve()
    assert job.layout.dp == 4
