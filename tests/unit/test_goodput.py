"""Checkpoints against failures: known answers, and closed forms against the simulator that shares nothing with them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.plan.failures import KINDS, Pool, live_through, simulate
from meshwright.plan.goodput import (
    Reliability,
    best_interval,
    daly_interval,
    exact_interval,
    expected_goodput,
    first_order_goodput,
    mtbf_of_run,
    shares,
    young_interval,
)
from meshwright.plan.quantities import DAY, HOUR
from meshwright.plan.spares import cover, expected_rate, running_rate, spares_needed

MINUTE = 60.0
LLAMA_3 = 54 * DAY / 419
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 devices (arXiv 2407.21783)."""

some_seconds = st.floats(0.1, 1e4)


@pytest.mark.parametrize(("mtbf_minutes", "printed"), [(24 * 60, "117"), (6 * 60, "57"), (15, "9.1")])
def test_daly_printed_these_intervals_for_a_stall_of_five_minutes(mtbf_minutes: float, printed: str) -> None:
    minutes = daly_interval(5 * MINUTE, mtbf_minutes * MINUTE) / MINUTE
    assert f"{minutes:.1f}" == printed if "." in printed else f"{minutes:.0f}" == printed


def test_a_checkpoint_dearer_than_two_mtbf_is_written_once_an_mtbf() -> None:
    assert daly_interval(20.0, 10.0) == 10.0


def test_llama_3_failed_every_three_hours_and_needs_eighteen_spares() -> None:
    assert f"{LLAMA_3 / HOUR:.2f}" == "3.09"
    assert mtbf_of_run(50_700 * HOUR, 16_384) / HOUR == pytest.approx(3.09, abs=0.005)
    assert spares_needed(LLAMA_3, 24 * HOUR, 0.999) == 18
    assert cover(LLAMA_3, 24 * HOUR, 17) < 0.999 <= cover(LLAMA_3, 24 * HOUR, 18)


def test_a_restart_that_may_wait_needs_fewer_spares() -> None:
    needed = [spares_needed(LLAMA_3, 24 * HOUR, 0.999, delay=hours * HOUR) for hours in (0, 1, 6, 12, 24)]
    assert needed == sorted(needed, reverse=True)
    assert needed[-1] == 0


@settings(max_examples=60, deadline=None)
@given(stall=some_seconds, mtbf=st.floats(1.0, 1e6))
def test_no_interval_beats_the_exact_one(stall: float, mtbf: float) -> None:
    one = Reliability(mtbf=mtbf, stall=stall)
    best = exact_interval(stall, mtbf)
    top = expected_goodput(best, one)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert expected_goodput(best * factor, one) <= top * (1 + 1e-12)
    if stall < mtbf / 4:
        assert expected_goodput(daly_interval(stall, mtbf), one) >= top * (1 - 2e-3)
        assert expected_goodput(young_interval(stall, mtbf), one) >= top * (1 - 0.05)


@settings(max_examples=60, deadline=None)
@given(
    mtbf=st.floats(100, 1e6),
    stall=some_seconds,
    write=st.floats(0, 1e3),
    downtime=st.floats(0, 1e3),
    interval=st.floats(1, 1e5),
)
def test_shares_sum_to_one_and_first_order_agrees_when_all_is_short(
    mtbf: float, stall: float, write: float, downtime: float, interval: float
) -> None:
    one = Reliability(mtbf=mtbf, stall=stall, write=write, detection=downtime / 4, restart=downtime * 3 / 4)
    parts = shares(interval, one)
    assert math.fsum(parts.model_dump().values()) == pytest.approx(1, abs=1e-9)
    assert min(parts.model_dump().values()) >= -1e-12
    lost = stall / interval + (interval / 2 + downtime + write) / mtbf
    assert first_order_goodput(interval, one) == pytest.approx(max(0, 1 - lost))
    assert parts.kept == pytest.approx(1 - lost, abs=2 * lost**2 + 1e-9)


def test_an_asynchronous_checkpoint_costs_only_its_stall() -> None:
    waiting = Reliability(mtbf=3 * HOUR, stall=60.0)
    behind = Reliability(mtbf=3 * HOUR, stall=2.0, write=58.0)
    assert expected_goodput(best_interval(behind), behind) > expected_goodput(best_interval(waiting), waiting)
    assert best_interval(behind) == pytest.approx(exact_interval(2.0, 3 * HOUR))
    slow = Reliability(mtbf=3 * HOUR, stall=2.0, write=1000.0)
    assert best_interval(slow) == 998.0, "a checkpoint begins when the one before is finished"


@settings(max_examples=40, deadline=None)
@given(step=st.floats(0.5, 500), mtbf=st.floats(600, 1e5), stall=st.floats(1, 100), write=st.floats(0, 300))
def test_the_interval_in_whole_steps_is_the_best_whole_number(
    step: float, mtbf: float, stall: float, write: float
) -> None:
    one = Reliability(mtbf=mtbf, stall=stall, write=write)
    interval = best_interval(one, step)
    steps = round(interval / step)
    assert steps >= 1 and steps * step == pytest.approx(interval)
    assert interval + stall >= write - 1e-6
    best = expected_goodput(interval, one)
    for other in (steps - 1, steps + 1):
        if other >= 1 and other * step + stall >= write:
            assert expected_goodput(other * step, one) <= best * (1 + 1e-12)


GRID = list(itertools.product((400.0, 4000.0), (4.0, 40.0), (0.0, 90.0), ((0.0, 0.0), (20.0, 150.0))))


@pytest.mark.parametrize(("mtbf", "stall", "write", "down"), GRID)
def test_the_simulator_agrees_with_the_closed_form(
    mtbf: float, stall: float, write: float, down: tuple[float, float]
) -> None:
    one = Reliability(mtbf=mtbf, stall=stall, write=write, detection=down[0], restart=down[1])
    interval = best_interval(one)
    seen = simulate(one, interval, failures=6_400, seed=3)
    # Sixteen intervals of 95 %: twice their width makes one chance in a thousand that any of them misses.
    wide = (seen.high - seen.low) / 2
    expected = shares(interval, one).model_dump()
    assert abs(seen.goodput - expected["kept"]) <= 2 * wide
    assert wide <= 0.02
    assert math.fsum(seen.shares.values()) == pytest.approx(1, abs=1e-9)
    for kind, share in expected.items():
        assert seen.shares[kind] == pytest.approx(share, abs=0.02), kind


@pytest.mark.parametrize("replicas", [1, 16])
@pytest.mark.parametrize("spares", [6, 12, 18])
def test_the_simulator_agrees_when_devices_run_out(replicas: int, spares: int) -> None:
    one = Reliability(mtbf=LLAMA_3, stall=10.0, restart=120.0)
    interval = best_interval(one)
    seen = simulate(one, interval, Pool(repair=24 * HOUR, spares=spares, replicas=replicas), failures=8_000, seed=5)
    product = expected_goodput(interval, one) * expected_rate(one.mtbf, 24 * HOUR, spares, replicas)
    assert product == pytest.approx(seen.goodput, abs=(seen.high - seen.low))
    assert (seen.shares["idle"] > 0.01) == (replicas == 1 and spares <= 12)
    assert set(seen.shares) == set(KINDS)


def test_the_same_seed_gives_the_same_history() -> None:
    one = Reliability(mtbf=1000.0, stall=5.0)
    assert simulate(one, 100.0, failures=320, seed=1) == simulate(one, 100.0, failures=320, seed=1)
    assert simulate(one, 100.0, failures=320, seed=1) != simulate(one, 100.0, failures=320, seed=2)


def test_a_run_is_lived_through_again_by_hand() -> None:
    one = Reliability(mtbf=1.0, stall=1.0, detection=2.0, restart=3.0)
    # 10, stall, 10, stall, 3 lost at 25; back at 30; 4 lost at 34; fails again at 35; back at 40; saved at 55
    parts = live_through(one, 10.0, [25.0, 34.0, 35.0, 99.0], 55.0)
    seconds = {kind: round(55.0 * share, 9) for kind, share in parts.items() if share}
    assert seconds == {"kept": 20.0 + 14.0, "stall": 2.0 + 1.0, "replay": 3.0 + 4.0, "detection": 5.0, "restart": 6.0}
    behind = live_through(Reliability(mtbf=1.0, stall=1.0, write=5.0), 10.0, [25.0], 25.5)
    assert behind["kept"] * 25.5 == pytest.approx(10.5), "the second checkpoint was not finished at 25"


def test_a_run_whose_moments_were_drawn_is_the_simulated_one() -> None:
    one = Reliability(mtbf=400.0, stall=4.0, write=10.0, detection=5.0, restart=20.0)
    moments = np.cumsum(np.random.default_rng(7).exponential(one.mtbf, 8_000)).tolist()
    seen, expected = live_through(one, 60.0, moments, moments[-1]), shares(60.0, one).model_dump()
    for kind, share in expected.items():
        assert seen[kind] == pytest.approx(share, abs=0.01), kind


def test_missing_replicas_slow_a_run_down() -> None:
    assert running_rate(0, 1) == 1 and running_rate(1, 1) == 0
    assert running_rate(2, 8) == 0.75 and running_rate(9, 8) == 0
    assert expected_rate(100.0, 0.0, 0) == 1
    assert expected_rate(100.0, 50.0, 100) == pytest.approx(1)
    assert expected_rate(1.0, 5_000.0, 5_500) == pytest.approx(1), "a large mean does not underflow"


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: Reliability(mtbf=-1.0, stall=1.0), "mtbf: -1"),
        (lambda: Reliability(mtbf=math.inf, stall=1.0), "mtbf: inf"),
        (lambda: Reliability(mtbf=1.0, stall=0.0), "checkpoint cost: 0"),
        (lambda: Reliability(mtbf=1.0, stall=1.0, write=-1.0), "checkpoint write: -1"),
        (lambda: Reliability(mtbf=1.0, stall=1.0, restart=math.nan), "restart: nan"),
        (lambda: mtbf_of_run(1.0, 0), "devices: 0"),
        (lambda: spares_needed(1.0, 1.0, 1.0), "confidence: 1"),
        (lambda: spares_needed(1.0, -1.0, 0.9), "repair: -1"),
        (lambda: cover(1.0, 1.0, -1), "spares: -1"),
        (lambda: expected_rate(1.0, 1.0, 0, 0), "replicas: 0"),
        (lambda: Pool(spares=-2), "spares: -2"),
        (lambda: simulate(Reliability(mtbf=1.0, stall=1.0), 1.0, failures=3), "failures: 3"),
        (lambda: live_through(Reliability(mtbf=1.0, stall=1.0), 1.0, [3.0, 2.0], 9.0), "moments: 2 s"),
        (lambda: live_through(Reliability(mtbf=1.0, stall=1.0), 1.0, [-3.0], 9.0), "moments: -3 s"),
        (lambda: live_through(Reliability(mtbf=1.0, stall=1.0), 1.0, [], 0.0), "end: 0"),
        (lambda: expected_goodput(0.0, Reliability(mtbf=1.0, stall=1.0)), "interval: 0"),
    ],
)
def test_impossible_quantities_are_refused(call, word: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=word):
        call()
