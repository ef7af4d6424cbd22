"""A step's pipeline time in closed form, for arrays of layouts; ``simulate`` gives it exactly, one layout at a time.

Time = the slowest rank's work for all micro-batches + the bubble of the other ranks' mean stage + messages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.schedule.bubble import bubble
from meshwright.schedule.in_flight_closed import schedule_numbers
from meshwright.schedule.orders import (
    DUALPIPEV,
    INTERLEAVED,
    LOOPED_BFS,
    ONE_F_ONE_B,
    TWO_BW,
    ZBV,
    ZERO_BUBBLE,
    slot_form,
)  # fmt: skip

Seconds = NDArray[np.float64]


class _Parts(NamedTuple):
    """Forward, input-backward and weight-backward seconds."""

    f: Any
    i: Any
    w: Any

    @property
    def all(self) -> Any:
        return self.f + self.i + self.w


def estimate(
    schedule: str | ArrayLike,
    pp: ArrayLike,
    virtual: ArrayLike,
    micro_batches: ArrayLike,
    forward: ArrayLike,
    input_backward: ArrayLike,
    weight_backward: ArrayLike,
    transfer: ArrayLike,
) -> Seconds:
    """Seconds of a step's forwards and backwards, ``[layouts]``; of 2BW one between the first and the last.

    Against ``simulate``: exact for GPipe, and without messages and for like stages for 1F1B, interleaved, looped-bfs
    and DualPipeV. Over random cases (up to 10 ranks, 4 stages each, 1 to 6 micro-batches a rank, first and last stage
    within 30 % of the others, messages up to a fifth of a stage's forward) off by at most 12 %, 2.5 % in the root mean
    square; the worst are zero bubble with fewer micro-batches than two rounds.

    Args:
        schedule: a name, or positions in ``SCHEDULES``; this, the next three and ``transfer`` broadcast.
        pp: pipeline ranks.
        virtual: stages a rank.
        micro_batches: of a step.
        forward: seconds of a micro-batch's forward in the first stage, each middle stage, the last: ``[layouts, 3]``.
            With one stage in all, the first counts; with two, give the middle what a middle stage would take.
        input_backward: the same for the input part of the backward.
        weight_backward: the same for the weight part; a whole backward takes both.
        transfer: seconds of a message between ranks; messages travel beside computation.
    """
    code, pp, virtual, count, transfer = np.broadcast_arrays(
        schedule_numbers(schedule), pp, virtual, micro_batches, np.asarray(transfer, float)
    )
    classes = [np.asarray(part, float) for part in (forward, input_backward, weight_backward)]
    first, middle, last = (_Parts(*(part[..., place] for part in classes)) for place in range(3))
    stages = pp * virtual
    total = _Parts(*(a + (stages - 2) * b + c for a, b, c in zip(first, middle, last, strict=True)))
    time, slowest = np.zeros(()), np.zeros(())
    for own, there, behind in _ranks(first, middle, last, code, pp, virtual):
        others = _Parts(*((a - b) / np.maximum(1, stages - virtual) for a, b in zip(total, own, strict=True)))
        early = _early(code, pp, virtual, count, behind, own, middle, last)
        idle = np.maximum(0.0, bubble(code, pp, *others) - early)
        mine = np.where(there, count * own.all + idle, 0.0)
        time, slowest = np.maximum(time, mine), np.maximum(slowest, np.where(there, own.all, 0.0))
    slack = slowest - total.all / pp
    mean = _Parts(*(part / stages for part in total))
    time = time + _fill(code, pp, virtual, count, mean, transfer)
    time = time + _steady(code, pp, virtual, count, mean, transfer, slack)
    time = np.where(code == TWO_BW, count * _continuous(pp, first, middle, last, transfer), time)
    time = np.where(code == ZBV, np.maximum(time, _few_folded(pp, count, total, mean, transfer)), time)
    return np.asarray(np.where(pp == 1, count * first.all, time), np.float64)


def _ranks(
    first: _Parts, middle: _Parts, last: _Parts, code: Any, pp: Any, virtual: Any
) -> list[tuple[_Parts, Any, Any]]:
    """The first, a middle and the last rank: a micro-batch's seconds, whether there is one, ranks behind it.

    Of the middle ranks the last counts: it has the fewest micro-batches in flight.
    """

    def add(a: _Parts, times: Any, b: _Parts) -> _Parts:
        return _Parts(*(x + times * y for x, y in zip(a, b, strict=True)))

    folded = (code == ZBV) | (code == DUALPIPEV)
    ends = add(first, np.where(folded, 0, virtual - 1), middle)
    return [
        (add(ends, np.where(folded, 1, 0), last), pp > 1, pp - 1),
        (add(_Parts(0.0, 0.0, 0.0), virtual, middle), np.where(folded, pp > 1, pp > 2), 1),
        (add(last, virtual - 1, middle), ~folded & (pp > 1), 0),
    ]


def _early(code: Any, pp: Any, virtual: Any, count: Any, behind: Any, own: _Parts, middle: _Parts, last: _Parts) -> Any:
    """What a rank slower than the others saves of the bubble: it works at forwards ahead while it waits.

    It waits for its first micro-batch in its last stage to go to the last rank and back (``once``), and may wait so
    for each further set of micro-batches in flight (``again``).
    """
    ahead = behind * np.where(code == INTERLEAVED, 2, 1)
    left = virtual * count - (virtual - 1) * slot_form(code, pp, virtual, count, 0).in_turn - 1
    stage = _Parts(*(part / virtual for part in own))
    here = _Parts(*(np.where(virtual == 1, a, b) for a, b in zip(stage, middle, strict=True)))
    there_and_back = np.where(behind > 0, here.all + (behind - 1) * middle.all + last.all, last.all)
    once = np.minimum(ahead, left) * (here.f - np.where(code == ZERO_BUBBLE, middle.w, 0.0))
    again = np.where(left > ahead, (ahead + 1) * stage.all - there_and_back, once)
    in_folds = np.where(code == ZBV, pp + 1, (4 * pp + 2) / 3) * (own.all - 2 * middle.all)  # fitted
    folded = (code == ZBV) | (code == DUALPIPEV)
    slots = (code == ONE_F_ONE_B) | (code == INTERLEAVED) | (code == ZERO_BUBBLE)
    return np.maximum(0.0, np.select([slots, folded], [np.minimum(once, again), in_folds], 0.0))


def _continuous(pp: Any, first: _Parts, middle: _Parts, last: _Parts, transfer: Any) -> Any:
    """Seconds a micro-batch takes once nobody waits at the end of a step.

    From a stage to one behind it and back, ``n`` stages away, ``n + 1`` micro-batches are under way, so they take the
    mean of the stages' times and of two messages for each boundary; the worst stretch of stages counts. Of like middle
    stages all or none belong to it.
    """
    inner, there_and_back = np.maximum(pp - 2, 0), 2 * transfer
    stretches = [
        (first.all, 1),
        (last.all, 1),
        (inner * middle.all + (inner - 1) * there_and_back, inner),
        (first.all + inner * (middle.all + there_and_back), inner + 1),
        (last.all + inner * (middle.all + there_and_back), inner + 1),
        (first.all + last.all + inner * middle.all + (pp - 1) * there_and_back, pp),
    ]
    worst = np.zeros(())
    for seconds, stages in stretches:
        worst = np.maximum(worst, np.where(stages > 0, seconds / np.maximum(stages, 1), 0.0))
    return worst


def _few_folded(pp: Any, count: Any, total: _Parts, mean: _Parts, transfer: Any) -> Any:
    """ZBV with fewer than ``2 pp`` micro-batches: the first one's way through all stages, then the others behind it."""
    chain = total.f + total.i + 2 * mean.w + (4 * (pp - 1) + count - 1) * transfer
    filling = np.minimum(count, pp) - 1
    return chain + 2 * filling * (mean.i + mean.w) + 2 * np.maximum(0, count - pp) * (mean.f + mean.i)


def _fill(code: Any, pp: Any, virtual: Any, count: Any, stage: _Parts, transfer: Any) -> Any:
    """What the first micro-batches' messages, there and back, add; and turns that wait for a round to come round."""
    in_turn = slot_form(code, pp, virtual, count, 0).in_turn
    chain = 2 * (pp - 1) * transfer
    # From the last rank to the first for its next turn: a turn's work may hide the way round.
    backward = stage.i + stage.w
    around = sum(np.maximum(0.0, pp * (part + transfer) - in_turn * part) for part in (stage.f, backward))
    looped = (code == INTERLEAVED) | (code == LOOPED_BFS)
    chain = chain + np.where(looped, (virtual - 1) * around, 0.0)
    short = np.maximum(0, pp - in_turn)
    # Zero bubble: with few micro-batches there are fewer weight parts than the drain has room for, and with fewer
    # than a round the first rank waits for its next turn, with weight parts at hand.
    unfilled = np.maximum(0, pp - virtual * count) * stage.w
    waits = short * (stage.f + stage.i) - np.minimum(in_turn * stage.w, short * stage.i)
    turn = np.where(in_turn <= pp, pp * transfer, 0.0) + waits
    zero = 2 * np.minimum(pp, virtual * count) * transfer - 2 * transfer + (virtual - 1) * turn + unfilled
    return chain + np.select([code == ZERO_BUBBLE, code == ZBV], [zero, 3 * (pp - 1) * transfer], 0.0)


def _steady(code: Any, pp: Any, virtual: Any, count: Any, stage: _Parts, transfer: Any, slack: Any) -> Any:
    """What messages add to every further micro-batch: too few are in flight to hide the way there and back."""
    back_and_forth = 2 * (pp - 1) / pp * transfer
    hidden = virtual * (pp - 1) / pp * np.maximum(0.0, 2 * transfer - stage.w)
    half = virtual * np.maximum(0.0, transfer - stage.all / 2)
    each = np.select(
        [(code == ONE_F_ONE_B) | (code == DUALPIPEV), code == ZERO_BUBBLE, code == INTERLEAVED],
        [back_and_forth, hidden, half],
        0.0,
    )
    return np.maximum(0, count - 1) * np.maximum(0.0, each - slack)
