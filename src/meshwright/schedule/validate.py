"""What is wrong with a schedule table, in sentences; nothing when it can run."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.job.layout import DELAYED_SCHEDULES
from meshwright.job.schedule_rules import micro_batch_rule
from meshwright.schedule.needs import leaves_after, needs, places, rounds
from meshwright.schedule.orders import KINDS
from meshwright.schedule.table import Table

SHOWN = 8
"""Sentences of one kind that are given before the rest is counted."""


def validate(table: Table) -> list[str]:
    """Sentences that say what is wrong; empty: the table is legal and runs to its end.

    Legal: sizes the schedule allows; every action on the rank that holds its stage; every micro-batch once forward in
    every stage and once backward, whole or in two parts; backward after forward, weight part after input part;
    gradients of a stage in micro-batch order (so that every schedule adds them alike); no rank waits for ever. Where
    steps overlap, every backward also finds the parameters that its forward used.
    """
    wrong = micro_batch_rule(table.schedule, table.pp, table.virtual, table.micro_batches_of_step)
    if wrong:
        return [wrong]
    for check in (_ranges, _placement, _counts, _order, _versions, _deadlock):
        found = check(table)
        if found:  # later checks take earlier ones as passed
            return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more of this kind"]
    return []


def _ranges(table: Table) -> list[str]:
    stages, count = table.stage_count, table.micro_batches
    outside = (table.stage < 0) | (table.stage >= stages) | (table.micro_batch < 0) | (table.micro_batch >= count)
    return [
        f"{_name(table, action)}: there are stages 0 to {stages - 1} and micro-batches 0 to {count - 1}"
        for action in np.flatnonzero(outside)
    ]


def _placement(table: Table) -> list[str]:
    holder = table.rank_of_stage[table.stage]
    return [
        f"{_name(table, action)} on rank {table.rank[action]}: rank {holder[action]} holds that stage"
        for action in np.flatnonzero(holder != table.rank)
    ]


def _counts(table: Table) -> list[str]:
    shape = (table.stage_count, table.micro_batches)
    count = np.zeros((len(KINDS), *shape), int)
    np.add.at(count, (table.kind, table.stage, table.micro_batch), 1)
    forward, whole, inputs, weights = count
    found = [
        f"F{index} of stage {stage}: {forward[stage, index]} times; every micro-batch goes forward once a stage"
        for stage, index in np.argwhere(forward != 1)
    ]
    once = ((whole == 1) & (inputs == 0) & (weights == 0)) | ((whole == 0) & (inputs == 1) & (weights == 1))
    for stage, index in np.argwhere(~once):
        times = ", ".join(f"{kind} {count[KINDS.index(kind), stage, index]}" for kind in "BIW")
        found.append(
            f"backward of micro-batch {index} in stage {stage}: {times} times; it takes one B, or one I and one W"
        )
    return found


def _order(table: Table) -> list[str]:
    forward, backward, gradient = places(table)
    pairs = [
        (backward < forward, "B or I", "its own F"),
        (gradient < backward, "W", "its own I"),
    ]
    found = [
        f"micro-batch {index} in stage {stage}: {late} before {early}"
        for mask, late, early in pairs
        for stage, index in np.argwhere(mask)
    ]
    found += [
        f"stage {stage}: the gradient of micro-batch {index + 1} comes before that of {index}"
        for stage, index in np.argwhere(np.diff(gradient, axis=1) < 0)
    ]
    return found


def _versions(table: Table) -> list[str]:
    """A stage has two versions of its parameters: the step after next takes the place of a step's."""
    if table.schedule not in DELAYED_SCHEDULES:
        return []
    forward, _, gradient = places(table)
    by_step = (table.stage_count, table.steps, table.micro_batches_of_step)
    begins, ends = forward.reshape(by_step).min(axis=-1), gradient.reshape(by_step).max(axis=-1)
    return [
        f"stage {stage}: step {step + 2} begins with {_name(table, begins[stage, step + 2])} before step {step} ends "
        f"with {_name(table, ends[stage, step])}, so that it would overwrite the parameters of that backward"
        for stage, step in np.argwhere(begins[:, 2:] < ends[:, :-2])
    ]


def _deadlock(table: Table) -> list[str]:
    needed = needs(table)
    after = np.where(needed < 0, -1, leaves_after(table)[needed])
    stuck = rounds(table.starts, after).stuck
    return [
        f"rank {rank} waits for ever at {_name(table, action)}: it needs {_name(table, after[action])}, "
        f"which waits behind {_name(table, stuck[table.rank[after[action]]])} on rank {table.rank[after[action]]}"
        for rank, action in enumerate(stuck)
        if action >= 0
    ]


def _name(table: Table, action: Any) -> str:
    return f"{KINDS[table.kind[action]]}{table.micro_batch[action]} of stage {table.stage[action]}"
