"""How long a schedule takes when stages and messages take unequal times.

Every rank works off its row in order; a computation starts when the rank is free and what it takes in has arrived.
So no clock runs: nodes (computations, and messages that take turns) are worked off in rounds in which each needs only
earlier rounds, all of a round at once, and each start is ``max(end of the row's previous, arrival)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.errors import InputError
from meshwright.schedule.needs import boundaries, leaves_after, needs, rounds
from meshwright.schedule.orders import FORWARD, INPUT, WEIGHT, WHOLE, Integers
from meshwright.schedule.table import Table

Seconds = NDArray[np.float64]
Sends = Literal["overlapped", "in-turn", "blocking"]
"""How messages travel: beside computation, any number at once; beside it, one after another from each rank; or the
sending rank computes nothing meanwhile. The receiver waits only for what has not arrived."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """A schedule in time. Of each rank, ``busy + fill + steady + drain + exposed`` is the makespan."""

    table: Table
    start: Seconds
    """``[actions]``, as the table's arrays."""
    end: Seconds
    makespan: float
    busy: Seconds
    """``[pp]``: computing."""
    fill: Seconds
    """``[pp]``: waiting for other ranks' computations until the rank's first backward starts."""
    steady: Seconds
    """``[pp]``: the same from then until its last forward."""
    drain: Seconds
    """``[pp]``: the same afterwards, and done before the others."""
    exposed: Seconds
    """``[pp]``: waiting for a message on its way, or sending when that blocks."""

    @property
    def bubble(self) -> Seconds:
        """``[pp]``: idle without being held up by messages."""
        return self.fill + self.steady + self.drain


def simulate(
    table: Table,
    forward: ArrayLike,
    input_backward: ArrayLike,
    weight_backward: ArrayLike,
    transfer: ArrayLike = 0.0,
    *,
    sends: Sends = "overlapped",
) -> Simulation:
    """Run a valid table.

    Args:
        table: of the schedule.
        forward: seconds of a micro-batch's forward in each stage, ``[stages]`` or one number.
        input_backward: seconds of the input part of its backward. A whole backward takes both parts; a stage that
            takes both at once where the schedule parts them (it recomputes itself) has them here, and 0 below.
        weight_backward: seconds of the weight part.
        transfer: seconds of a message over each boundary (``s`` lies between stages ``s`` and ``s + 1``) in either
            direction, ``[stages - 1]`` or one number. Between stages of one rank nothing is sent, whatever it says.
        sends: see :data:`Sends`.

    Raises:
        InputError: arrays of the wrong length, or a table that waits for ever.
    """
    plan = _plan(table, sends)
    duration = _durations(table, forward, input_backward, weight_backward)
    message = _messages(table, plan.crossed, transfer)
    travel = message[plan.source]  # of a send node: its own action's message
    length = np.where(plan.is_send, travel, duration[plan.action])
    lag = np.where(plan.lags, travel, 0.0)
    start, end = _run(plan, length, lag)
    return _account(table, plan, start, end)


def _durations(table: Table, forward: ArrayLike, input_backward: ArrayLike, weight_backward: ArrayLike) -> Seconds:
    by_kind = np.empty((4, table.stage_count))
    for kind, name, value in (
        (FORWARD, "forward", forward),
        (INPUT, "input_backward", input_backward),
        (WEIGHT, "weight_backward", weight_backward),
    ):
        by_kind[kind] = _per(name, value, table.stage_count, "stages")
    by_kind[WHOLE] = by_kind[INPUT] + by_kind[WEIGHT]
    return np.asarray(by_kind[table.kind, table.stage], np.float64)


def _messages(table: Table, crossed: Integers, transfer: ArrayLike) -> Seconds:
    """Seconds of the message each action sends, ``[actions + 1]``; 0 of those that send none, and of -1."""
    per_boundary = np.append(_per("transfer", transfer, table.stage_count - 1, "boundaries"), 0.0)
    return np.append(per_boundary[crossed], 0.0)


def _per(name: str, value: ArrayLike, count: int, what: str) -> Seconds:
    seconds = np.asarray(value, np.float64)
    if seconds.shape not in ((), (count,)) or not (seconds >= 0).all():
        raise InputError(f"{name}: {value!r}; give one number or one for each of the {count} {what}, none below 0")
    return np.broadcast_to(seconds, (count,))


@dataclass(frozen=True, eq=False)
class _Plan:
    """The nodes to work off. The first ``len(table.kind)`` are the actions, the rest messages that take turns."""

    crossed: Integers
    """Of each action: the boundary its result crosses; -1: none."""
    departs: Integers
    """Of each action: the one after which its result is there."""
    action: Integers
    """Of each node: the action it is, or the action whose result it sends."""
    is_send: NDArray[np.bool_]
    source: Integers
    """Of each node: the action whose message it waits for or is; -1: none."""
    lags: NDArray[np.bool_]
    """Of each node: the message it waits for is no node, its travel is waited for in between."""
    previous: Integers
    """Of each node: the one before in its row; -1: none."""
    in_rows: bool
    """Messages stand in the rows of the computations: sending blocks."""
    order: Integers
    """Nodes in the order they are worked off, round by round."""
    back: Integers
    """Of each node: its place in that order."""
    ends: list[int]
    """Where the rounds end in that order."""
    ordered_previous: Integers
    """Places of the nodes before, in that order."""
    ordered_required: Integers
    """Places of the nodes needed, in that order; -1: none."""


@lru_cache(maxsize=64)
def _plan(table: Table, sends: Sends) -> _Plan:
    """Rows and needs of one table; kept, since the same table is run with many different times."""
    count = len(table.kind)
    own = np.arange(count)
    needed, departs, crossed = needs(table), leaves_after(table), boundaries(table)
    remote = (needed >= 0) & (table.rank[needed] != table.rank)
    sender = np.flatnonzero(crossed >= 0) if sends != "overlapped" else np.zeros(0, np.int64)
    send_of = np.full(count, -1)
    send_of[sender] = count + np.arange(len(sender))
    action = np.concatenate([own, sender])
    is_send = np.arange(len(action)) >= count
    arrives_with = departs if sends == "overlapped" else send_of
    required = np.concatenate([np.where(remote, arrives_with[needed], needed), departs[sender]])
    source = np.concatenate([np.where(remote, needed, -1), sender])
    lags = np.concatenate([remote, np.zeros(len(sender), bool)]) & (sends == "overlapped")
    # Rows: by rank (messages that take turns beside the computations: rows of their own), then by time of departure.
    row = table.rank[action] + (table.pp * is_send if sends == "in-turn" else 0)
    place = np.where(is_send, departs[action], action)
    sequence = np.lexsort((action, is_send, place, row))
    starts = np.concatenate([[0], np.cumsum(np.bincount(row))])
    done = rounds(starts, _renumbered(required[sequence], sequence))
    if (done.stuck >= 0).any():
        raise InputError("schedule table: ranks wait for each other for ever; validate() names them")
    previous = np.full(len(action), -1)
    previous[sequence[1:]] = np.where(np.diff(row[sequence]), -1, sequence[:-1])
    order = sequence[done.order]
    back = _renumbered(np.arange(len(order)), order)
    return _Plan(
        crossed, departs, action, is_send, source, lags, previous, sends == "blocking", order, back, done.ends,
        ordered_previous=_renumbered(previous[order], order),
        ordered_required=_renumbered(required[order], order),
    )  # fmt: skip


def _renumbered(nodes: Integers, sequence: Integers) -> Integers:
    """Node numbers as places in ``sequence``; -1 stays."""
    place = np.empty(len(sequence) + 1, np.int64)
    place[sequence], place[-1] = np.arange(len(sequence)), -1
    return place[nodes]


def _run(plan: _Plan, length: Seconds, lag: Seconds) -> tuple[Seconds, Seconds]:
    """Start and end of every node."""
    lag, length = lag[plan.order], length[plan.order]
    start = np.empty(len(plan.order))
    end = np.zeros(len(plan.order) + 1)  # the last stays 0: nothing to wait for
    for begin, stop in pairwise([0, *plan.ends]):
        arrival = end[plan.ordered_required[begin:stop]] + lag[begin:stop]
        starts = np.maximum(arrival, end[plan.ordered_previous[begin:stop]], out=start[begin:stop])
        np.add(starts, length[begin:stop], out=end[begin:stop])
    return start[plan.back], end[plan.back]


def _account(table: Table, plan: _Plan, start: Seconds, end: Seconds) -> Simulation:
    """What each rank's time went into."""
    count, first = len(table.kind), table.starts[:-1]
    free = np.append(end, 0.0)[plan.previous[:count]]
    source = plan.source[:count]
    ready = np.append(end[plan.departs], 0.0)[source]  # when the message waited for could go
    waits = np.where(source >= 0, np.clip(start[:count] - np.maximum(free, ready), 0.0, None), 0.0)
    idle = start[:count] - free - waits
    action = np.arange(count)
    backward_begins = np.minimum.reduceat(np.where(table.kind == FORWARD, count, action), first)[table.rank]
    forward_ends = np.maximum.reduceat(np.where(table.kind == FORWARD, action, -1), first)[table.rank]
    filling = action <= backward_begins
    draining = ~filling & (action > forward_ends)
    exposed = _sum(table, waits)
    finished = end[table.starts[1:] - 1]
    if plan.in_rows:
        sender = table.rank[plan.action[count:]]
        exposed += np.bincount(sender, (end - start)[count:], table.pp)
        np.maximum.at(finished, sender, end[count:])
    makespan = float(end[:count].max())
    return Simulation(
        table=table,
        start=start[:count],
        end=end[:count],
        makespan=makespan,
        busy=_sum(table, end[:count] - start[:count]),
        fill=_sum(table, idle * filling),
        steady=_sum(table, idle * ~(filling | draining)),
        drain=_sum(table, idle * draining) + (makespan - finished),
        exposed=exposed,
    )


def _sum(table: Table, seconds: Seconds) -> Seconds:
    """Sums of each rank's actions, ``[pp]``."""
    return np.asarray(np.add.reduceat(seconds, table.starts[:-1]), np.float64)
