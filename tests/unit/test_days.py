"""From steps to days and money: known answers, and the options of the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.plan_days import DaysOptions, days_lines, parse_mtbf
from meshwright.errors import InputError
from meshwright.job.cluster import load_cluster
from meshwright.plan.days import run_length
from meshwright.plan.horizon import Horizon, Question, horizon, measured_checkpoint_cost
from meshwright.plan.quantities import DAY, HOUR, Price, parse_duration, parse_price, show_duration


def test_a_run_counts_whole_steps_and_all_devices() -> None:
    run = run_length(1001.0, 100, 2.0, 4, goodput=0.5, price=Price(3.0, "EUR"))
    assert run.steps == 11
    assert run.seconds == 44.0
    assert run.device_hours == pytest.approx(4 * 44 / HOUR)
    assert run.cost == pytest.approx(3.0 * 4 * 44 / HOUR)
    assert run.currency == "EUR"
    assert run_length(1000.0, 100, 2.0, 4).cost is None


OPTIONS = DaysOptions(
    tokens=300e9,
    mtbf="50700h/device",
    checkpoint_cost="30s",
    detection="30s",
    restart="5min",
    repair="24h",
    price="2.10 USD",
)


def test_one_answer_from_tokens_to_money() -> None:
    question = OPTIONS.question(16_384)
    assert question is not None
    answer = horizon(question, step_time=5.0, tokens_per_step=16e6, devices=16_384)
    assert answer.checkpoints is not None and answer.spares is not None
    assert answer.run is not None and answer.simulated is not None
    assert answer.spares.used == 18
    assert answer.run.devices == 16_384 + 18
    assert answer.simulated.low <= answer.goodput <= answer.simulated.high
    assert answer.run.goodput == answer.goodput < answer.checkpoints.goodput
    assert answer.run.seconds == pytest.approx(answer.run.steps * 5.0 / answer.goodput)
    text = "\n".join(days_lines(answer))
    for word in ("failures", "every", "Daly", "goodput", "spares", "simulated", "days", "USD"):
        assert word in text
    assert Horizon.model_validate_json(answer.model_dump_json()) == answer


def test_without_failures_the_days_are_those_of_the_steps() -> None:
    question = DaysOptions(tokens=1e6).question(8)
    assert question is not None
    answer = horizon(question, step_time=1.0, tokens_per_step=1000, devices=8)
    assert answer.run is not None and answer.run.days == pytest.approx(1000 / DAY)
    assert answer.goodput == 1.0 and answer.checkpoints is None
    assert DaysOptions().question(8) is None


def test_replicas_go_on_only_when_asked() -> None:
    asked = DaysOptions(mtbf="3h", checkpoint_cost="30s", repair="24h", spares=0, elastic=True).question(64, 32)
    waits = DaysOptions(mtbf="3h", checkpoint_cost="30s", repair="24h", spares=0).question(64, 32)
    assert asked is not None and waits is not None
    asked, waits = (replace(one, simulated_failures=320) for one in (asked, waits))
    assert (asked.replicas, waits.replicas) == (32, 1)
    one = horizon(asked, step_time=5.0, tokens_per_step=1e6, devices=64)
    other = horizon(waits, step_time=5.0, tokens_per_step=1e6, devices=64)
    assert one.goodput > 0.6 > other.goodput


def test_the_cost_of_a_checkpoint_is_read_from_a_run(tmp_path: Path) -> None:
    events = [
        {"event": "started"},
        *({"event": "saved", "step": n, "seconds": s} for n, s in enumerate((1.0, 3.0, 2.0))),
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert measured_checkpoint_cost(tmp_path) == 2.0
    question = DaysOptions(mtbf="3h", checkpoint_cost=str(tmp_path)).question(1)
    assert question is not None and question.reliability is not None
    assert question.reliability.stall == 2.0


def test_a_run_without_checkpoint_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give the directory of a run"):
        measured_checkpoint_cost(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"event": "started"}\n')
    with pytest.raises(InputError, match="no checkpoint of this run has a time"):
        measured_checkpoint_cost(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"event": \n')
    with pytest.raises(InputError, match="line 1 is not JSON"):
        measured_checkpoint_cost(tmp_path)


def test_times_and_prices_are_read_with_their_units() -> None:
    assert parse_duration("3.09h", "x") == pytest.approx(3.09 * HOUR)
    assert parse_duration(" 30 s ", "x") == 30.0
    assert parse_duration("2d", "x") == 2 * DAY
    assert parse_price("2.10 USD") == parse_price("2.1usd") == Price(2.1, "USD")
    assert parse_mtbf("50700h/device", 16_384) / HOUR == pytest.approx(3.09, abs=0.01)
    assert show_duration(3.09 * HOUR) == "3.09 h" and show_duration(90.0) == "1.5 min"
    assert show_duration(0.02) == "20 ms"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mtbf": "-3h", "checkpoint_cost": "30s"}, "--mtbf: -10800 seconds is not a finite number of at least 0"),
        ({"mtbf": "0h", "checkpoint_cost": "30s"}, "'0h' is no time between failures"),
        ({"mtbf": "3", "checkpoint_cost": "30s"}, "'3' is no time; write a number and one of"),
        ({"mtbf": "3 fortnights", "checkpoint_cost": "30s"}, "is no time"),
        ({"mtbf": "3h/node", "checkpoint_cost": "30s"}, "per 'node'"),
        ({"mtbf": "3h"}, "give --checkpoint-cost"),
        ({"mtbf": "3h", "checkpoint_cost": "0s"}, "would make saving free"),
        ({"repair": "24h"}, "without --mtbf nothing fails"),
        ({"tokens": 1e9, "price": "2.10"}, "'2.10' has no currency; write it behind the amount, as 2.10 USD"),
        ({"tokens": 1e9, "price": "2.10 dollars"}, "names no currency"),
        ({"tokens": 1e9, "price": "-1 USD"}, "price: -1"),
        ({"tokens": 1e9, "price": "cheap"}, "'cheap' is no price"),
        ({"price": "2.10 USD"}, "give the number of tokens"),
        ({"tokens": -5.0}, "tokens: -5"),
        ({"tokens": float("nan")}, "tokens: nan"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        DaysOptions(**options).question(8)  # type: ignore[arg-type]
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"step_time": 0.0}, "step time: 0"),
        ({"tokens_per_step": 0}, "tokens a step: 0"),
        ({"devices": 0}, "devices: 0"),
        ({"goodput": 0.0}, "goodput: 0"),
        ({"goodput": 1.1}, "goodput: 1.1"),
    ],
)
def test_impossible_runs_are_refused(change: dict[str, float], word: str) -> None:
    given = {"tokens": 1e6, "tokens_per_step": 100, "step_time": 1.0, "devices": 1, **change}
    with pytest.raises(InputError, match=word):
        run_length(**given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="step time"):
        horizon(Question(), step_time=-1.0, tokens_per_step=1, devices=1)


def test_the_cluster_file_says_what_a_device_costs_and_how_often_it_fails() -> None:
    known = load_cluster("1x8 A100-SXM4-80GB").model_copy(
        update={"price_per_device_hour": "2.10 USD", "mtbf_device_hours": 50_700.0}
    )
    asked = DaysOptions(tokens=1e9, checkpoint_cost="30s").with_defaults(known).question(8)
    assert asked is not None and asked.price == Price(2.1, "USD")
    assert asked.reliability is not None and asked.reliability.mtbf == 50_700 * HOUR / 8
    own = DaysOptions(tokens=1e9, price="1 EUR", mtbf="3h", checkpoint_cost="30s")
    assert own.with_defaults(known) == own
    assert DaysOptions().with_defaults(known).question(8) is None
    only_days = DaysOptions(tokens=1e9).with_defaults(known).question(8)
    assert only_days is not None and only_days.reliability is None
