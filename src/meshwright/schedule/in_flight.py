"""How many micro-batches' activations a rank holds: counted in a table, and in closed form.

A micro-batch of a stage is alive from its forward on. A whole backward ends it. Where the backward is in two parts
there are two counts, and what a program holds lies between them: alive until the *input* part (everything the
forward saved), alive until the *weight* part (what the weight gradients still need: the inputs of the matrices and
the gradients of their outputs). Stages that recompute take both parts at once, so there the first count holds.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from meshwright.schedule.orders import FORWARD, INPUT, WEIGHT, WHOLE, Integers
from meshwright.schedule.table import Table

Until = Literal["input", "weight"]


class InFlight(NamedTuple):
    """Largest numbers of (stage, micro-batch) activations alive at one time."""

    rank: Integers
    """``[pp]``: of all the rank's stages together."""
    stage: Integers
    """``[stages]``: of each stage alone; a rank's stages need not peak at the same time."""


def alive(table: Table, until: Until = "weight") -> Integers:
    """Micro-batches alive during each action, that action's own included: ``[actions, virtual]``.

    The second axis is the rank's stages in increasing order.
    """
    local = table.stage // table.pp
    ends = (WHOLE, INPUT if until == "input" else WEIGHT)
    begun = np.zeros((len(table.kind), table.virtual), np.int64)
    ended = np.zeros_like(begun)
    action = np.arange(len(table.kind))
    begun[action, local] = table.kind == FORWARD
    ended[action, local] = np.isin(table.kind, ends)
    # Every rank ends what it begins, so one sum over all ranks is right for each.
    return np.cumsum(begun, axis=0) - np.cumsum(ended, axis=0) + ended


def in_flight(table: Table, until: Until = "weight") -> InFlight:
    """The peaks of :func:`alive`."""
    counts = alive(table, until)
    first = table.starts[:-1]
    stages = np.maximum.reduceat(counts, first, axis=0)
    by_stage = np.zeros(table.stage_count, np.int64)
    for rank in range(table.pp):
        by_stage[list(table.stages_of(rank))] = stages[rank]
    return InFlight(np.maximum.reduceat(counts.sum(axis=1), first), by_stage)
