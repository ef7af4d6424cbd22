"""Activations in flight: a plain count, the table's count and the closed form are one."""

from __future__ import annotations

from itertools import product
from typing import get_args

import numpy as np
import pytest

from meshwright.job.schedule_rules import micro_batch_rule
from meshwright.schedule.in_flight import Until, in_flight
from meshwright.schedule.in_flight_closed import in_flight_closed, stage_in_flight_closed
from meshwright.schedule.orders import SCHEDULES
from meshwright.schedule.table import Table, table

SIZES = {
    schedule: [
        (pp, virtual, micro_batches)
        for pp, virtual, micro_batches in product((1, 2, 3, 4, 7), range(1, 5), (*range(1, 7), 8, 9, 14, 16, 21))
        if micro_batch_rule(schedule, pp, virtual, micro_batches) is None and (pp > 1 or virtual == 1)
    ]
    for schedule in SCHEDULES
}
UNTIL: tuple[Until, ...] = get_args(Until)


def plain_count(made: Table, until: Until) -> tuple[list[int], list[int]]:
    """Peaks per rank and per stage, one action after the other."""
    ends = ("B", "I") if until == "input" else ("B", "W")
    ranks, stages = [0] * made.pp, [0] * made.stage_count
    for rank, row in enumerate(made.rows):
        held: set[tuple[int, int]] = set()
        for kind, stage, index in row:
            if kind == "F":
                held.add((stage, index))
            ranks[rank] = max(ranks[rank], len(held))
            stages[stage] = max(stages[stage], sum(one == stage for one, _ in held))
            if kind in ends:
                held.remove((stage, index))
    return ranks, stages


@pytest.mark.parametrize("until", UNTIL)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tables_are_counted_right(schedule: str, until: Until) -> None:
    for pp, virtual, micro_batches in SIZES[schedule][::13]:
        made = table(schedule, pp, virtual, micro_batches)
        found = in_flight(made, until)
        assert (found.rank.tolist(), found.stage.tolist()) == plain_count(made, until), (pp, virtual, micro_batches)


@pytest.mark.parametrize("until", UNTIL)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_closed_forms_are_the_count(schedule: str, until: Until) -> None:
    for pp, virtual, micro_batches in SIZES[schedule]:
        made = table(schedule, pp, virtual, micro_batches)
        counted = in_flight(made, until)
        rank, local = np.arange(pp), np.arange(virtual)
        by_stage = np.array([counted.stage[list(made.stages_of(one))] for one in rank])
        closed = in_flight_closed(schedule, pp, virtual, micro_batches, rank, until)
        stages = stage_in_flight_closed(schedule, pp, virtual, micro_batches, rank[:, None], local, until)
        assert closed.tolist() == counted.rank.tolist(), (pp, virtual, micro_batches)
        assert stages.tolist() == by_stage.tolist(), (pp, virtual, micro_batches)


def test_known_figures() -> None:
    """Of the papers, in activations of the whole rank: 1F1B p - r; interleaved p (1 + (p-1)/(p v)) on rank 0."""
    assert in_flight_closed("gpipe", 4, 1, 8, np.arange(4)).tolist() == [8, 8, 8, 8]
    assert in_flight_closed("1f1b", 4, 1, 8, np.arange(4)).tolist() == [4, 3, 2, 1]
    assert in_flight_closed("interleaved", 4, np.array([2, 4]), 8, 0) / [2, 4] == pytest.approx([5.5, 4.75])
    assert in_flight_closed("zero-bubble", 4, 2, 8, np.arange(4)).tolist() == [8, 8, 8, 8]
    assert in_flight_closed("zbv", 4, 2, 8, np.arange(4)).tolist() == [8, 8, 8, 8]
    assert in_flight_closed("dualpipev", 4, 2, 8, np.arange(4)).tolist() == [9, 9, 9, 9]


def test_arrays_of_layouts_give_what_single_layouts_give() -> None:
    all_sizes = [(code, *one) for code, name in enumerate(SCHEDULES) for one in SIZES[name]]
    code, pp, virtual, micro_batches = np.array(all_sizes).T
    rank = np.arange(len(pp)) % pp
    together = in_flight_closed(code, pp, virtual, micro_batches, rank)
    for place, (number, *one) in enumerate(all_sizes):
        assert together[place] == in_flight_closed(SCHEDULES[number], *one, rank[place])
