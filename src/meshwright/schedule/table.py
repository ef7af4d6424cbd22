"""A pipeline schedule as a table: for every pipeline rank, what it computes in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.job.layout import DELAYED_SCHEDULES, V_SCHEDULES
from meshwright.job.schedule_rules import micro_batch_rule
from meshwright.schedule.orders import KINDS, Integers, rank_order

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One computation: forward, whole backward, or its input or weight part, of a micro-batch in a stage."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True, eq=False)
class Table:
    """What every rank computes. Arrays are ``[actions]``, rank after rank; ``rows`` has the same as objects."""

    schedule: str
    pp: int
    virtual: int
    micro_batches: int
    kind: Integers
    """Position in ``orders.KINDS``."""
    stage: Integers
    micro_batch: Integers
    held: NDArray[np.bool_]
    """Its output is sent only after the rank's next action."""
    starts: Integers
    """``[pp + 1]``: rank ``r`` has the actions ``starts[r]`` to ``starts[r + 1]``."""
    steps: int = 1
    """Steps whose micro-batches these are, ``micro_batches / steps`` each, in a schedule that lets them overlap."""

    @property
    def micro_batches_of_step(self) -> int:
        """Micro-batches of each step."""
        return self.micro_batches // self.steps

    @property
    def version(self) -> Integers:
        """Of each action: after how many updates its parameters are, counted from the first step here.

        Where steps overlap (2BW), those of one step before; the first step has what the step before it would have had.
        """
        step = self.micro_batch // self.micro_batches_of_step
        return np.maximum(step - 1, 0) if self.schedule in DELAYED_SCHEDULES else step

    @property
    def stage_count(self) -> int:
        """Stages in all."""
        return self.pp * self.virtual

    @cached_property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """Per pipeline rank the actions in running order."""
        columns = zip(self.kind.tolist(), self.stage.tolist(), self.micro_batch.tolist(), strict=True)
        actions = [Action(KINDS[kind], stage, micro_batch) for kind, stage, micro_batch in columns]  # type: ignore[arg-type]
        return tuple(tuple(actions[self.starts[rank] : self.starts[rank + 1]]) for rank in range(self.pp))

    @cached_property
    def rank(self) -> Integers:
        """The rank of each action."""
        return np.repeat(np.arange(self.pp), np.diff(self.starts))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank in increasing order, as ``Layout.stages_of``."""
        return stages_of(self.schedule, self.pp, self.virtual, rank)

    @cached_property
    def rank_of_stage(self) -> Integers:
        """The rank that holds each stage."""
        held = np.zeros(self.stage_count, np.int64)
        for rank in range(self.pp):
            held[list(self.stages_of(rank))] = rank
        return held

    def with_rows(self, rows: Sequence[Sequence[Action]]) -> Table:
        """The same sizes with other actions, in any order, right or wrong."""
        actions = [action for row in rows for action in row]
        numbers = [(KINDS.index(kind), stage, micro_batch) for kind, stage, micro_batch in actions]
        columns = np.array(numbers, np.int64).reshape(-1, 3)
        starts = np.cumsum([0, *(len(row) for row in rows)])
        held = np.zeros(len(actions), bool)
        kind, stage, micro_batch = (column.copy() for column in columns.T)
        sizes = (self.schedule, self.pp, self.virtual, self.micro_batches)
        return Table(*sizes, kind, stage, micro_batch, held, starts, self.steps)


def stages_of(schedule: str, pp: int, virtual: int, rank: int) -> tuple[int, ...]:
    """The stages of a pipeline rank in increasing order, as ``Layout.stages_of``."""
    if pp > 1 and schedule in V_SCHEDULES:
        return (rank, 2 * pp - 1 - rank)
    return tuple(range(rank, pp * virtual, pp))


@lru_cache(maxsize=64)
def table(schedule: str, pp: int, virtual: int, micro_batches: int, steps: int = 1) -> Table:
    """The schedule as the program runs it.

    Args:
        schedule: name as in ``Layout.schedule``.
        pp: pipeline ranks. 1: no pipeline, one stage, forward and backward of each micro-batch in turn.
        virtual: stages on each rank.
        micro_batches: micro-batches a data-parallel rank runs in one step.
        steps: how many steps, numbered through; more than one only where they overlap.

    Raises:
        InputError: the schedule cannot run these sizes.
    """
    if steps != 1 and schedule not in DELAYED_SCHEDULES:
        raise InputError(f"steps: {steps}, but schedule {schedule} ends with each step; use 1")
    wrong = micro_batch_rule(schedule, pp, virtual, micro_batches)
    if micro_batches < 1:
        wrong = f"micro-batches: {micro_batches} is none at all; a step needs at least 1"
    if wrong:
        raise InputError(wrong)
    micro_batches *= steps
    if pp == 1:
        virtual, orders = 1, [rank_order("1f1b", 1, 1, micro_batches, 0)]
    else:
        orders = [rank_order(schedule, pp, virtual, micro_batches, rank) for rank in range(pp)]
    kind, local, micro_batch, held = (np.concatenate(column) for column in zip(*orders, strict=True))
    starts = np.cumsum([0, *(len(order.kind) for order in orders)])
    held_stages = np.array([stages_of(schedule, pp, virtual, rank) for rank in range(pp)])
    stage = held_stages[np.repeat(np.arange(pp), np.diff(starts)), local]
    return Table(schedule, pp, virtual, micro_batches, kind, stage, micro_batch, held, starts, steps)
