"""What must have ended before a computation can start, and in which rounds everything then can."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.schedule.orders import FORWARD, INPUT, WEIGHT, WHOLE, Integers
from meshwright.schedule.table import Table


class Places(NamedTuple):
    """Where each computation stands in the table's arrays: ``[stages, micro_batches]``, -1 where it is missing."""

    forward: Integers
    backward: Integers
    """The whole backward or its input part."""
    gradient: Integers
    """The whole backward or its weight part."""


def places(table: Table) -> Places:
    """See :class:`Places`; of an action that is there twice, one."""

    def where(*kinds: int) -> Integers:
        chosen = np.flatnonzero(np.isin(table.kind, kinds))
        found = np.full((table.stage_count, table.micro_batches), -1)
        found[table.stage[chosen], table.micro_batch[chosen]] = chosen
        return found

    return Places(where(FORWARD), where(WHOLE, INPUT), where(WHOLE, WEIGHT))


def needs(table: Table) -> Integers:
    """The action whose result each action takes in, ``[actions]``; -1: none.

    A forward takes the activations of the stage before, a backward the gradient of the stage after (on the last
    stage: its own forward's loss), a weight part what its input part has left.
    """
    forward, backward, _ = places(table)
    nothing = np.full((1, table.micro_batches), -1)
    before = np.concatenate([nothing, forward[:-1]])
    after = np.concatenate([backward[1:], forward[-1:]])
    kind, at = table.kind, (table.stage, table.micro_batch)
    return np.select([kind == FORWARD, kind == WEIGHT], [before[at], backward[at]], after[at])


def boundaries(table: Table) -> Integers:
    """The boundary each action's result crosses to another rank, ``[actions]``; -1: none.

    Boundary ``s`` lies between stages ``s`` and ``s + 1``. Results for a stage of the same rank are not sent.
    """
    ahead = table.kind == FORWARD
    boundary = np.where(ahead, table.stage, table.stage - 1)
    crosses = (table.kind != WEIGHT) & (boundary >= 0) & (boundary < table.stage_count - 1)
    holder = table.rank_of_stage
    inside = np.where(crosses, boundary, 0)
    other = np.minimum(inside + 1, table.stage_count - 1)
    return np.where(crosses & (holder[inside] != holder[other]), boundary, -1)


def leaves_after(table: Table) -> Integers:
    """The action after which each action's result is there, ``[actions]``: itself, or the next if held and sent."""
    return np.arange(len(table.kind)) + (table.held & (boundaries(table) >= 0))


class Rounds(NamedTuple):
    """The order in which nodes can be worked off: each round's nodes need only earlier rounds'."""

    order: Integers
    """Nodes, round by round."""
    ends: list[int]
    """Round ``i`` is ``order[ends[i - 1]:ends[i]]``."""
    stuck: Integers
    """Per row the node it waits at for ever, -1 where it comes to its end."""


def rounds(starts: Integers, required: Integers) -> Rounds:
    """Work off rows of nodes, each row in its order, each node once the node it requires is done.

    Args:
        starts: ``[rows + 1]``: row ``r`` has the nodes ``starts[r]`` to ``starts[r + 1]``.
        required: ``[nodes]``: a node that must be done before; -1: none.
    """
    done = np.zeros(len(required) + 1, bool)
    done[-1] = True  # where -1 points
    position, end = starts[:-1].copy(), starts[1:]
    open_rows = np.flatnonzero(position < end)
    found: list[Integers] = []
    while len(open_rows):
        next_nodes = position[open_rows]
        ready = done[required[next_nodes]]
        if not ready.any():
            break
        nodes = next_nodes[ready]
        done[nodes] = True
        found.append(nodes)
        position[open_rows[ready]] += 1
        open_rows = open_rows[position[open_rows] < end[open_rows]]
    order = np.concatenate(found) if found else np.zeros(0, np.int64)
    ends = np.cumsum([len(nodes) for nodes in found]).tolist()
    return Rounds(order, ends, np.where(position < end, position, -1))
