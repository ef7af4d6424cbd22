"""What the comparison over a slow link makes of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.slow_link import ALONE, PLAIN, STRATEGIES, row
from bench.slow_link_runs import Pace, Run, Scale, Strategy, crossing, read
from meshwright.job.job import load_job

SCALE = Scale(steps=10, tokens=256, most=1.5, rate="100mbit", lr=1e-3)


def test_a_loss_is_reached_between_two_validations() -> None:
    run = Run([1.0] * 4, [(2, 5.0), (4, 4.0)], [], 0, None)
    assert run.steps_to(4.5) == 3.0
    assert run.steps_to(5.5) == 2.0
    assert run.steps_to(3.9) is None


def test_first_steps_cost_what_plain_all_reduce_does() -> None:
    warm = Strategy("warm", {"compression": "dgc", "compression_warmup_steps": lambda steps: steps // 5})
    paces = {PLAIN.name: Pace(8.0, 100.0, 98.0), "warm": Pace(2.0, 10.0, 8.0)}
    run = Run([], [(4, 5.0), (8, 4.0)], [], 0, None)
    figures = row(warm, run, 4.0, paces, compute=1.0, scale=SCALE)
    assert figures["steps"] == 8
    assert figures["seconds"] == 2 * 8.0 + 6 * 2.0
    assert figures["closed"] == (80 - 28) / (80 - 10)
    assert figures["times_faster"] == 80 / 28
    assert figures["times_fewer_bytes"] == 1000 / (2 * 100 + 6 * 10)
    assert figures["link_over_ledger"] == 1.25
    assert row(warm, run, 3.0, paces, compute=1.0, scale=SCALE)["seconds"] is None


def test_what_crosses_between_two_hosts_of_two_ranks(tmp_path: Path) -> None:
    ledger = {"ranks": [{"sends": [{"wire": 30}, {"wire": 60}]}] * 4}
    assert crossing(ledger, PLAIN) == 4 * 90 * 2 / 3  # two of a rank's three peers are on the other host
    assert crossing(ledger, ALONE) is None
    lines = [{"step": 1, "step_seconds": 2.0, "loss": 5.0}, {"step": 1, "validation_loss": 5.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "ledger.json").write_text(json.dumps(ledger))
    run = read(tmp_path, PLAIN, 250)
    assert (run.step_seconds, run.validation, run.losses) == ([2.0], [(1, 5.5)], [5.0])
    assert (run.link_bytes, run.ledger_bytes) == (250, 240)


@pytest.mark.parametrize("strategy", [PLAIN, ALONE, *STRATEGIES], ids=lambda strategy: strategy.name)
def test_every_strategy_is_a_job(tmp_path: Path, strategy: Strategy) -> None:
    text = Path("examples/quickstart.toml").read_text(encoding="utf-8").replace("clip_norm = 1.0\n", "")
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    constant = ["optimizer.schedule=constant", "optimizer.min_lr_ratio=0"]
    job = load_job(path, [*strategy.settings(300), *constant], "dp=4").resolve()
    assert job.layout.dp == 4
