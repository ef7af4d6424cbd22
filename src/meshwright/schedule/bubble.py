"""Bubbles in closed form: what a step takes beyond the work of one rank, when all stages take equal times."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.schedule.in_flight_closed import schedule_numbers
from meshwright.schedule.orders import DUALPIPEV, TWO_BW, ZBV, ZERO_BUBBLE


def bubble(
    schedule: str | ArrayLike, pp: ArrayLike, forward: ArrayLike, input_backward: ArrayLike, weight_backward: ArrayLike
) -> NDArray[np.float64]:
    """Seconds of a step in which a rank does nothing: the makespan less one rank's work. Messages take no time.

    With F, I and W the seconds of *one stage* (with v stages a rank, v times less than the rank's):

        gpipe, 1f1b, interleaved, looped-bfs   (pp-1) (F + I + W)
        zero-bubble                            (pp-1) max(F + I - W, F, I)
        zbv                                    max((pp-1) max(F, I), max(F, I) + (pp-2) W, 2 (pp-1) (I - W))
        dualpipev                              max((pp-1) (2F + max(0, I - W)), (pp-2) F + (pp-1) (2I - W))
        2bw                                    0, of every step between the first and the last

    Exact for ``F <= I``, ``W <= I`` and micro-batches in whole rounds of ``pp``, at least ``2 pp`` of them. DualPipeV's
    is that of torch's runtime, which runs a forward and a backward that are meant to overlap one after the other and
    sends the forward's output after both; sent at once it would be ``(pp-1) max(F + I - W, F, I)``, as zero bubble's.

    Args:
        schedule: a name, or positions in ``SCHEDULES``; all arguments broadcast against each other.
        pp: pipeline ranks.
        forward: F.
        input_backward: I.
        weight_backward: W.
    """
    code, hops, f, i, w = np.broadcast_arrays(
        schedule_numbers(schedule),
        np.asarray(pp) - 1,
        *(np.asarray(one, float) for one in (forward, input_backward, weight_backward)),
    )
    return _bubble(code, hops, f, i, w)


def _bubble(code: Any, hops: Any, f: Any, i: Any, w: Any) -> NDArray[np.float64]:
    longer, more = np.maximum(f, i), np.maximum(0.0, i - w)
    folded = np.maximum(np.maximum(hops * longer, longer + (hops - 1) * w), 2 * hops * more)
    paired = np.maximum(hops * (2 * f + more), (hops - 1) * f + hops * (2 * i - w))
    forms = [(ZERO_BUBBLE, hops * np.maximum(f + more, i)), (ZBV, folded), (DUALPIPEV, paired), (TWO_BW, 0.0 * f)]
    found = np.select([code == number for number, _ in forms], [form for _, form in forms], hops * (f + i + w))
    return np.asarray(np.where(hops > 0, found, 0.0), np.float64)
