"""The arithmetic of ``bench.goodput``: the planner's words for a run, its ledger's shares, and when they agree."""

from __future__ import annotations

import numpy as np
import pytest

from bench.goodput import step_seconds
from bench.goodput_terms import LEDGER, Endured, Terms, agrees, compared, failure_moments, mean, model, table, typical
from meshwright.plan.failures import live_through
from meshwright.plan.goodput import Reliability, expected_goodput
from meshwright.recovery.goodput import PARTS

TERMS = Terms(step=0.5, stall=0.4, detection=0.1, restart=1.5)


def endured(memory: bool, **changed: float) -> Endured:
    """A run that went as the planner says, but for some seconds that another part took."""
    reliability, interval = model(TERMS, mtbf=20.0, every=10, memory=memory)
    moments = failure_moments(20.0, 200.0, seed=3)
    seen = live_through(reliability, interval, moments, 200.0)
    ledger = dict.fromkeys(PARTS, 0.0) | {LEDGER[kind]: 200.0 * seen[kind] for kind in LEDGER}
    for part, seconds in changed.items():
        ledger[part] += seconds
    steps = round(ledger["useful"] / TERMS.step)
    return Endured(seconds=200.0, failures=tuple(moments), ledger={**ledger, "idle": 7.0}, steps=steps)


@pytest.mark.parametrize("memory", [False, True])
def test_a_run_as_predicted_agrees_and_one_that_is_not_does_not(memory: bool) -> None:
    def found(**changed: float) -> dict[str, object]:
        return compared(TERMS, endured(memory, **changed), mtbf=20.0, every=10, memory=memory)

    right = found()
    assert agrees(right)
    assert right["goodput_measured"] == pytest.approx(right["goodput_relived"]), "what is idle is not in it"
    assert agrees(found(useful=-8.0, restart=8.0))
    assert not agrees(found(useful=-14.0, restart=14.0)), "7 points of the wall"
    assert not agrees(found(replayed=-12.0, checkpoint=12.0)), "the same goodput, wrongly shared"
    assert not agrees({**right, "goodput_by_steps": 0.3}), "time is useful, but no steps came of it"
    assert len(table("from disk", right)) == 2 + len(LEDGER) + 2


def test_terms_are_the_mean_of_those_before_and_after() -> None:
    slower = Terms(step=0.7, stall=0.4, detection=0.3, restart=2.5)
    both = mean([TERMS, slower])
    assert (both.step, both.stall, both.detection, both.restart) == pytest.approx((0.6, 0.4, 0.2, 2.0))


def test_from_memory_only_the_step_that_was_cut_off_is_lost() -> None:
    disk, interval = model(TERMS, mtbf=20.0, every=10, memory=False)
    assert (disk.stall, interval) == (0.4, 5.0)
    memory, step = model(TERMS, mtbf=20.0, every=10, memory=True)
    assert (memory.stall, step) == (pytest.approx(0.04), 0.5)
    assert memory.stall / step == pytest.approx(disk.stall / interval), "checkpoints cost the same"
    replay = live_through(memory, step, [20.3], 40.0)["replay"] * 40.0
    assert 0.0 < replay < 0.54


def test_the_scatter_is_that_of_so_many_failures() -> None:
    one = Reliability(mtbf=20.0, stall=0.4, detection=0.1, restart=1.5)
    average, error = typical(one, 5.0, 400.0)
    _, of_longer = typical(one, 5.0, 1600.0)
    assert average == pytest.approx(expected_goodput(5.0, one), abs=0.02)
    assert error == pytest.approx(2.0 * of_longer, rel=0.2)


def test_moments_come_in_order_before_the_end_and_as_often_as_said() -> None:
    moments = failure_moments(15.0, 60_000.0, seed=1)
    assert moments == sorted(moments) and moments[-1] < 60_000.0
    gaps = np.diff([0.0, *moments])
    assert len(moments) == pytest.approx(4000, rel=0.05)
    assert float(np.std(gaps)) == pytest.approx(15.0, rel=0.06), "exponential: as wide as its mean"


def test_a_step_time_has_no_checkpoint_and_no_slow_start_in_it() -> None:
    clock, rows = 0.0, []
    for step in range(1, 31):
        clock += 0.5 + (2.0 if step <= 6 else 0.0) + (3.0 if step % 10 == 1 else 0.0)
        rows.append({"step": step, "time": clock})
    assert step_seconds(rows, every=10) == pytest.approx(0.5)
