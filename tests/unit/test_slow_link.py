"""What the comparison over a slow link makes of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.slow_link import ALONE, PLAIN, PLAIN_SGD, STRATEGIES, Comparison, Kept, measure, row, table
from bench.slow_link_runs import Pace, Run, Scale, Strategy, crossing, read
from meshwright.job.job import load_job

SCALE = Scale(steps=10, tokens=256, most=1.5, rate="100mbit", lr=1e-3)


def test_a_loss_is_reached_between_two_validations() -> None:
    run = Run([1.0] * 4, [(2, 5.0), (4, 4.0)], [], 0, None)
    assert run.steps_to(4.5) == 3.0
    assert run.steps_to(5.5) == 2.0
    assert run.steps_to(3.9) is None


def test_first_steps_cost_what_plain_all_reduce_does() -> None:
    warm = Strategy("warm", {"compression": "int8", "compression_warmup_steps": lambda steps: steps // 5})
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


def test_a_ramp_costs_what_was_measured() -> None:
    ramp = Strategy("ramp", {"compression": "dgc", "compression_warmup_steps": 3}, ramp=True)
    paces = {PLAIN.name: Pace(8.0, 100.0, 98.0), "ramp": Pace(2.0, 1.0, 1.0, 3, 9.0, 50.0)}
    figures = row(ramp, Run([], [(8, 4.0)], [], 0, None), 4.0, paces, compute=1.0, scale=SCALE)
    assert figures["seconds"] == 9.0 + 5 * 2.0
    assert figures["times_fewer_bytes"] == 1000 / (50 + 5 * 1)


def test_what_depends_on_the_link_is_taken_from_its_own_run() -> None:
    queue = Strategy("queue", {"strategy": "server", "server_mode": "asynchronous"}, over_link=True)
    run = Run([1.0, 3.0, 2.0], [(3, 4.0)], [], 60, None)
    figures = row(queue, run, 4.0, {PLAIN.name: Pace(8.0, 100.0, 98.0)}, compute=1.0, scale=SCALE)
    assert (figures["seconds"], figures["step_seconds"]) == (6.0, 2.0)
    assert (figures["link_bytes_per_step"], figures["link_over_ledger"]) == (20.0, None)
    assert figures["times_fewer_bytes"] == 1000 / 60


def test_rounds_of_either_adam_in_which_gradients_travel_whole() -> None:
    one = Strategy("one", {"compression": "one-bit-adam", "compression_warmup_steps": 60})
    rare = Strategy("rare", {"compression": "zero-one-adam"})
    assert (one.whole_rounds(300, 40.0), one.whole_rounds(300, 299.6)) == (40, 60)
    # 16 in a row, 16 at a distance of 2, 16 at 4, 16 at 8, then one in 16
    assert (rare.whole_rounds(300, 16.0), rare.whole_rounds(300, 300.0)) == (16, 4 * 16 + 4)


def test_what_crosses_between_two_hosts_of_two_ranks(tmp_path: Path) -> None:
    ledger = {"ranks": [{"sends": [{"axis": "dp", "wire": 30}, {"axis": "world", "wire": 60}]}] * 4}
    (tmp_path / "ledger.json").write_text(json.dumps(ledger))
    assert crossing(tmp_path, PLAIN) == 4 * 90 * 2 / 3  # two of a rank's three peers are on the other host
    assert crossing(tmp_path, Strategy("rare", {"compression": "zero-one-adam"})) is None
    lines = [{"step": 1, "step_seconds": 2.0, "loss": 5.0}, {"step": 1, "validation_loss": 5.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "step_sec')  # the run is still going
    run = read(tmp_path, 250, crossing(tmp_path, PLAIN))
    assert (run.step_seconds, run.validation, run.losses) == ([2.0], [(1, 5.5)], [5.0])
    assert (run.link_bytes, run.ledger_bytes) == (250, 240)
    sends = [{"axis": "shard", "wire": 30}, {"axis": "replicate", "wire": 5}]
    (tmp_path / "ledger.json").write_text(json.dumps({"ranks": [{"sends": sends}] * 4}))
    assert crossing(tmp_path, PLAIN) == 4 * 5
    worker = {"push": 7, "pull": 5}
    (tmp_path / "summary.json").write_text(json.dumps({"servers": {"predicted": {"worker": worker}}}))
    assert crossing(tmp_path, Strategy("server", {"strategy": "server"})) == 2 * 12
    assert crossing(tmp_path, Strategy("queue", {"strategy": "server"}, over_link=True)) is None


def test_what_crosses_in_the_mean_of_a_period(tmp_path: Path) -> None:
    text = Path("examples/quickstart.toml").read_text(encoding="utf-8").replace("clip_norm = 1.0\n", "")
    found = {}
    for strategy in STRATEGIES:
        if strategy.sync.get("strategy") in ("local", "diloco"):
            words = [*strategy.settings(300), "optimizer.schedule=constant", "optimizer.min_lr_ratio=0"]
            (tmp_path / "first.toml").write_text(text, encoding="utf-8")
            job = load_job(tmp_path / "first.toml", words, strategy.layout).resolve()
            (tmp_path / "job.toml").write_text(job.to_toml(), encoding="utf-8")
            found[strategy.name] = crossing(tmp_path, strategy)
    # 4 ranks, each of which exchanges half of the 9,965,824 parameters of 4 bytes with one other
    small = 2 / 3 * 4 * (48 + 168)  # the agreement on every step
    assert found["local"] == pytest.approx(4 * 9_965_824 * 2 / 8 + small, rel=1e-3)
    assert found["diloco"] == pytest.approx(4 * 9_965_824 * 2 / 10 + small, rel=1e-3)
    assert found["diloco-dgc"] == pytest.approx(4 * 8 * 0.03 * 9_965_824 / 2 / 5 + small, rel=1e-3)


def test_a_strategy_with_sgd_is_held_against_all_reduce_with_sgd(tmp_path: Path) -> None:
    kept = Kept(tmp_path, SCALE)
    for name, loss in {"all-reduce": 4.0, "all-reduce-sgd": 5.0, "dgc-sgd": 4.9, "int8": 4.5}.items():
        kept.run(f"{name}-1", lambda loss=loss: Run([1.0] * 10, [(5, 6.0), (10, loss)], [], 0, None))
        kept.pace(name, lambda: Pace(1.0, 10.0, None))
    kept.pace(ALONE.name, lambda: Pace(0.5, 0.0, None))
    chosen = [one for one in STRATEGIES if one.name in ("int8", "dgc-sgd")]
    found = measure(Comparison(chosen, SCALE, kept, tmp_path), [1], 6, [])
    assert found["targets"] == {"all-reduce": [4.0], "all-reduce-sgd": [5.0]}
    steps = {name: runs[0]["steps"] for name, runs in found["strategies"].items()}
    assert steps == {"all-reduce": 10, "all-reduce-sgd": 10, "int8": None, "dgc-sgd": pytest.approx(5 + 5 / 1.1)}
    assert "loss of all-reduce-sgd: 5.000" in table(found)


@pytest.mark.parametrize("strategy", [PLAIN, PLAIN_SGD, ALONE, *STRATEGIES], ids=lambda strategy: strategy.name)
def test_every_strategy_is_a_job(tmp_path: Path, strategy: Strategy) -> None:
    text = Path("examples/quickstart.toml").read_text(encoding="utf-8").replace("clip_norm = 1.0\n", "")
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    constant = ["optimizer.schedule=constant", "optimizer.min_lr_ratio=0"]
    constant += [f"optimizer.{key}={value}" for key, value in strategy.optimizer.items()]
    whole_run = {"period": 150} if strategy is ALONE else {}
    job = load_job(path, [*strategy.settings(300, **whole_run), *constant], strategy.layout).resolve()
    assert job.layout.dp == 4
