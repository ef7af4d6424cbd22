"""Schedules in time: the figures of the papers, a plain simulation, closed forms against it."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.job.layout import DELAYED_SCHEDULES, LOOPED_SCHEDULES, V_SCHEDULES
from meshwright.job.schedule_rules import micro_batch_rule
from meshwright.schedule.bubble import bubble
from meshwright.schedule.in_flight import in_flight
from meshwright.schedule.orders import SCHEDULES
from meshwright.schedule.simulate import Sends, Simulation, simulate
from meshwright.schedule.table import Action, Table, table


def idle(simulation: Simulation) -> float:
    """Makespan less the work of one rank, the stages being alike."""
    return simulation.makespan - float(simulation.busy.max())


def idle_in_span(simulation: Simulation) -> float:
    """The same counted on each rank from its own first action to its own last."""
    first = simulation.table.starts[:-1]
    span = np.maximum.reduceat(simulation.end, first) - np.minimum.reduceat(simulation.start, first)
    return float((span - simulation.busy).max())


# One unit for each of F, I and W of a stage: bubble in units for p=4, m=8 and p=8, m=16, then the activations in
# flight on rank 0 in units of the whole rank's, p=4, m=8. Formulas: (p-1)(F+B) for GPipe (Huang et al. 2019), 1F1B and
# interleaved (Narayanan et al. 2021; in stages, which are v times shorter), breadth-first (Lamy-Poirier 2023);
# (p-1)(F+I-W) and m, p, p (1+(p-1)/(pv)) in flight; zero bubble and ZBV: Qi et al. 2023, tables 1 and 2.
FIGURES = [
    ("gpipe", 1, 9, 21, 8),
    ("1f1b", 1, 9, 21, 4),
    ("looped-bfs", 2, 9, 21, 8),
    ("looped-bfs", 4, 9, 21, 8),
    ("interleaved", 2, 9, 21, 5.5),
    ("interleaved", 4, 9, 21, 4.75),
    ("zero-bubble", 1, 3, 7, 4),
    ("zero-bubble", 2, 3, 7, 4),
    ("zbv", 2, 3, 7, 4),
]


@pytest.mark.parametrize(("schedule", "virtual", "small", "large", "held"), FIGURES)
def test_known_figures(schedule: str, virtual: int, small: int, large: int, held: float) -> None:
    for pp, micro_batches, units in ((4, 8, small), (8, 16, large)):
        made = table(schedule, pp, virtual, micro_batches)
        assert idle(simulate(made, 1, 1, 1)) == pytest.approx(units)
        assert bubble(schedule, pp, 1, 1, 1) == pytest.approx(units)
    assert in_flight(table(schedule, 4, virtual, 8)).rank[0] / virtual == held


def test_fractions_of_the_papers() -> None:
    """GPipe: (p-1)/(m+p-1) of the time; interleaving divides the bubble: .158 to .086 from 2 to 4 stages a rank."""
    for schedule, virtual, fraction in (
        ("gpipe", 1, 3 / 11), ("1f1b", 1, 3 / 11), ("interleaved", 2, 3 / 19), ("interleaved", 4, 3 / 35)
    ):  # fmt: skip
        simulation = simulate(table(schedule, 4, virtual, 8), 1, 1, 1)
        assert (simulation.bubble / simulation.makespan).max() == pytest.approx(fraction)


def test_zero_bubble_in_unequal_parts() -> None:
    """F, I, W = 1, 1.2, 0.8: (p-1)(F+I-W) = 4.2; ZBV has no bubble within a rank's span only if all are equal."""
    assert idle(simulate(table("zero-bubble", 4, 2, 8), 1, 1.2, 0.8)) == pytest.approx(4.2)
    assert idle_in_span(simulate(table("zbv", 4, 2, 8), 1, 1, 1)) == pytest.approx(0)
    assert idle_in_span(simulate(table("zbv", 4, 2, 8), 1, 1.2, 0.8)) == pytest.approx(2.4)


def test_dualpipev_pays_for_sending_after_the_pair() -> None:
    """3 and 7 units with outputs sent at once, as zero bubble; twice that as torch's runtime sends them."""
    for pp, micro_batches, units in ((4, 8, 3), (8, 16, 7)):
        made = table("dualpipev", pp, 2, micro_batches)
        assert idle(simulate(made.with_rows(made.rows), 1, 1, 1)) == pytest.approx(units)
        assert (
            idle(simulate(made, 1, 1, 1)) == pytest.approx(2 * units) == pytest.approx(bubble("dualpipev", pp, 1, 1, 1))
        )


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in DELAYED_SCHEDULES])
def test_bubbles_in_closed_form(schedule: str) -> None:
    random = np.random.default_rng(3)
    virtual = 2 if schedule in V_SCHEDULES else 3 if schedule in LOOPED_SCHEDULES else 1
    for pp in (2, 3, 4, 7):
        for micro_batches in (2 * pp, 4 * pp):
            part = random.uniform(1, 1.6)
            parts = (1.0, part, random.uniform(0.3, part))
            found = idle(simulate(table(schedule, pp, virtual, micro_batches), *parts))
            assert found == pytest.approx(float(bubble(schedule, pp, *parts))), (pp, micro_batches, parts)


def between_others(schedule: str, pp: int, micro_batches: int, *times: object) -> float:
    """Seconds that one step more takes, where steps overlap."""
    fewer, more = (
        simulate(table(schedule, pp, 1, micro_batches, steps), *times).makespan  # type: ignore[arg-type]
        for steps in (8, 16)
    )
    return (more - fewer) / 8


def test_no_bubble_where_steps_overlap() -> None:
    for pp, micro_batches in product((2, 3, 4, 7), (1, 2, 3)):
        count = micro_batches * pp
        assert between_others("2bw", pp, count, 1.0, 1.3, 0.7) == pytest.approx(count * 3.0)
        assert bubble("2bw", pp, 1.0, 1.3, 0.7) == 0
        # The first step fills the pipeline and the last one drains it.
        assert idle(simulate(table("2bw", pp, 1, count, 5), 1.0, 1.3, 0.7)) == pytest.approx((pp - 1) * 3.0)


@st.composite
def sizes(draw: st.DrawFn, ranks: int = 5) -> tuple[str, int, int, int]:
    """Any schedule at any legal size."""
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(1, ranks))
    virtual = 2 if schedule in V_SCHEDULES else draw(st.integers(1, 3)) if schedule in LOOPED_SCHEDULES else 1
    virtual = virtual if pp > 1 else 1
    legal = [count for count in range(1, 4 * pp + 1) if micro_batch_rule(schedule, pp, virtual, count) is None]
    return schedule, pp, virtual, draw(st.sampled_from(legal))


def played(
    made: Table, seconds: dict[str, list[float]], transfer: list[float], sends: Sends
) -> tuple[dict[Action, float], list[float]]:
    """One action after the other: when each ends, and what each rank waits for messages or spends sending."""
    holder = made.rank_of_stage.tolist()
    held = dict(zip((action for row in made.rows for action in row), made.held.tolist(), strict=True))
    free, link, exposed = [0.0] * made.pp, [0.0] * made.pp, [0.0] * made.pp
    ready: dict[tuple[str, int, int], tuple[float, float]] = {}  # message -> (when it left, when it arrived)
    ends: dict[Action, float] = {}
    position = [0] * made.pp

    def send(rank: int, action: Action) -> None:
        kind, stage, index = action
        target = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or not 0 <= target < made.stage_count or holder[target] == rank:
            return
        cost = transfer[min(stage, target)]
        begin = free[rank] if sends != "in-turn" else max(free[rank], link[rank])
        ready["F" if kind == "F" else "B", target, index] = (free[rank], begin + cost)
        link[rank] = begin + cost
        if sends == "blocking":
            free[rank] += cost
            exposed[rank] += cost

    while any(place < len(row) for place, row in zip(position, made.rows, strict=True)):
        for rank, row in enumerate(made.rows):
            if position[rank] == len(row):
                continue
            action = row[position[rank]]
            kind, stage, index = action
            source = stage - 1 if kind == "F" else stage + 1
            left = arrived = 0.0
            if kind != "W" and 0 <= source < made.stage_count:
                if holder[source] != rank:
                    if ("F" if kind == "F" else "B", stage, index) not in ready:
                        continue
                    left, arrived = ready["F" if kind == "F" else "B", stage, index]
                elif not any(Action(one, source, index) in ends for one in ("F" if kind == "F" else "BI")):  # type: ignore[arg-type]
                    continue
            start = max(free[rank], arrived)
            exposed[rank] += max(0.0, start - max(free[rank], left))
            free[rank] = ends[action] = start + seconds[kind][stage]
            position[rank] += 1
            before = row[position[rank] - 2] if position[rank] > 1 else None
            if before is not None and held[before]:
                send(rank, before)
            if not held[action]:
                send(rank, action)
    return ends, exposed


@settings(max_examples=40)
@given(sizes(), st.sampled_from(("overlapped", "in-turn", "blocking")), st.integers(0, 2**32 - 1))
def test_simulation_is_that_of_plain_play(one: tuple[str, int, int, int], sends: Sends, seed: int) -> None:
    made, random = table(*one), np.random.default_rng(seed)
    forward, inputs, weights = random.uniform(0.2, 2, (3, made.stage_count))
    transfer = random.uniform(0, 1, made.stage_count - 1)
    seconds = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
    ends, exposed = played(made, {kind: list(one) for kind, one in seconds.items()}, list(transfer), sends)
    simulation = simulate(made, forward, inputs, weights, transfer, sends=sends)
    actions = [action for row in made.rows for action in row]
    assert simulation.end == pytest.approx([ends[action] for action in actions])
    assert simulation.exposed == pytest.approx(exposed)
    work = [sum(seconds[kind][stage] for kind, stage, _ in row) for row in made.rows]
    assert simulation.busy == pytest.approx(work)
    assert simulation.busy + simulation.bubble + simulation.exposed == pytest.approx(simulation.makespan)
    assert min(map(np.min, (simulation.fill, simulation.steady, simulation.drain, simulation.exposed))) > -1e-9


def test_idle_time_of_1f1b_by_hand() -> None:
    """Three ranks, F = 1 and B = 2: rank r starts after r F, waits (2-r)(F+B), ends r B early."""
    simulation = simulate(table("1f1b", 3, 1, 6), 1, 1, 1)
    assert simulation.fill == pytest.approx([4, 3, 2])
    assert simulation.steady == pytest.approx([0, 0, 0])
    assert simulation.drain == pytest.approx([2, 3, 4])
    slow_middle = simulate(table("1f1b", 3, 1, 6), [1, 2, 1], [1, 2, 1], [1, 2, 1])
    assert slow_middle.steady[2] > 0 and slow_middle.steady[1] == pytest.approx(0)


def test_messages_cost_only_where_they_are_not_hidden() -> None:
    """GPipe hides all but the way there and back; 1F1B, with as few in flight as there are ranks, does not."""
    for transfer, sends in ((0.1, "overlapped"), (0.1, "in-turn")):
        gpipe = simulate(table("gpipe", 4, 1, 8), 1, 1, 1, transfer, sends=sends)  # type: ignore[arg-type]
        assert gpipe.makespan == pytest.approx(33 + 6 * transfer)
    assert simulate(table("1f1b", 4, 1, 8), 1, 1, 1, 0.1).makespan > 33 + 6 * 0.1 + 0.5
    assert simulate(table("gpipe", 4, 1, 8), 1, 1, 1, 0.1, sends="blocking").exposed.min() >= 0.8


def test_nothing_is_sent_between_stages_of_a_rank() -> None:
    """ZBV folds stages 1 and 2 onto the last rank: that boundary's seconds are not read."""
    made = table("zbv", 2, 2, 4)
    assert simulate(made, 1, 1, 1, [0.1, 99, 0.1]).makespan == simulate(made, 1, 1, 1, 0.1).makespan


def test_wrong_times_are_refused() -> None:
    made = table("1f1b", 4, 1, 8)
    with pytest.raises(InputError, match="one for each of the 4 stages"):
        simulate(made, [1, 1, 1], 1, 1)
    with pytest.raises(InputError, match="none below 0"):
        simulate(made, 1, -1, 1)
    with pytest.raises(InputError, match="3 boundaries"):
        simulate(made, 1, 1, 1, [0.1, 0.1])
    with pytest.raises(InputError, match="wait for each other"):
        simulate(made.with_rows([row[::-1] for row in made.rows]), 1, 1, 1)


def test_large_pipelines_are_quick() -> None:
    """64 ranks, two stages each, 512 micro-batches: 196,608 actions in well under half a second of processor time."""
    began = time.process_time()
    simulation = simulate(table("zero-bubble", 64, 2, 512), 1, 1, 1, 0.01)
    assert time.process_time() - began < 0.5
    assert len(simulation.start) == 3 * 2 * 512 * 64
