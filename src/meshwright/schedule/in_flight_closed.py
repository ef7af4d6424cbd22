"""Micro-batches in flight in closed form, for arrays of layouts; ``in_flight`` counts the same in a table.

    schedule      alive on rank r, all its stages together (m micro-batches, v stages a rank, n = v m)
    gpipe, looped-bfs   n
    1f1b, 2bw           pp - r
    interleaved         (v-1) round + 2 (pp-1-r) + 1             round: about pp, see ``slot_form``
    zero-bubble         (v-1) round + pp - r  until the input part, (v-1) round + pp  until the weight part
    zbv                 2 pp
    dualpipev           2 pp + 1

each at most ``n``; ZBV also at most ``m + r + 1``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from meshwright.schedule.in_flight import Until
from meshwright.schedule.orders import DUALPIPEV, SCHEDULES, ZBV, Integers, slot_form


def schedule_numbers(schedule: str | ArrayLike) -> Integers:
    """A schedule's name, or positions in ``SCHEDULES``, as positions."""
    return np.asarray(SCHEDULES.index(schedule) if isinstance(schedule, str) else schedule)


def in_flight_closed(
    schedule: str | ArrayLike,
    pp: ArrayLike,
    virtual: ArrayLike,
    micro_batches: ArrayLike,
    rank: ArrayLike,
    until: Until = "weight",
) -> Integers:
    """Largest number of (stage, micro-batch) activations alive at one time on a rank.

    Args:
        schedule: a name, or positions in ``SCHEDULES``; all arguments broadcast against each other.
        pp: pipeline ranks; 1 holds one micro-batch.
        virtual: stages a rank.
        micro_batches: of a step.
        rank: pipeline rank.
        until: what ends an activation's life where the backward is in two parts, see ``in_flight``.
    """
    code, pp, virtual, count, rank = np.broadcast_arrays(schedule_numbers(schedule), pp, virtual, micro_batches, rank)
    _, lead, delay = slot_form(code, pp, virtual, count, rank)
    waiting = delay if until == "weight" else 0
    most = np.select(
        [pp == 1, code == ZBV, code == DUALPIPEV],
        [1, np.minimum(2 * pp, count + rank + 1), 2 * pp + 1],
        lead + 1 + waiting,
    )
    least: Integers = np.minimum(most, virtual * count)
    return least


def stage_in_flight_closed(
    schedule: str | ArrayLike,
    pp: ArrayLike,
    virtual: ArrayLike,
    micro_batches: ArrayLike,
    rank: ArrayLike,
    local: ArrayLike,
    until: Until = "weight",
) -> Integers:
    """Largest number of micro-batches alive at one time in a rank's stage number ``local`` (0: its first).

    A stage holds most when its first backward (or weight part) starts: of the forwards run until then, those that
    were its own. Stages of a rank do not all peak at the same time, so these add up to more than the rank's peak.
    """
    code, pp, virtual, count, rank, local = np.broadcast_arrays(
        schedule_numbers(schedule), pp, virtual, micro_batches, rank, local
    )
    in_turn, lead, delay = slot_form(code, pp, virtual, count, rank)
    waiting = delay if until == "weight" else 0
    run = np.minimum(lead + 1 + (virtual - 1 - local) * in_turn + waiting, virtual * count)
    cycles, rest = np.divmod(run, in_turn * virtual)
    own = cycles * in_turn + np.clip(rest - local * in_turn, 0, in_turn)
    folded = (code == ZBV) | (code == DUALPIPEV)
    return np.select([pp == 1, folded], [1, np.minimum(np.where(local == 0, 2 * pp - rank, rank + 1), count)], own)
