"""The Pareto front of time against memory: layouts that none beats in both."""

from __future__ import annotations

import numpy as np

from meshwright.plan.arrays import Floats, Ints


def front(memory: Floats, time: Floats) -> Ints:
    """Indices of the points that no other point beats, by rising memory and so by falling time.

    Of points alike in both the first stays.
    """
    order = np.lexsort((np.arange(len(memory)), time, memory))
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(time[order])[:-1]]) if len(order) else time
    return order[time[order] < best_before]
