"""When a checkpoint is due: by steps, by time, or by what checkpoints cost and how often the run fails."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from meshwright.checkpoint.world import World
from meshwright.job.sections import CheckpointSection

_FIRST_SECONDS = 60.0
"""Until the first checkpoint, whose cost nobody knows."""
_COSTS = 5
"""Latest costs, whose median counts."""


def young_interval(cost: float, mtbf: float) -> float:
    """Seconds of training between checkpoints that lose least: sqrt(2 cost mtbf) (Young 1974); all in seconds."""
    return math.sqrt(2.0 * cost * mtbf)


class Cadence:
    """Says after which steps to save. Time is rank 0's, told to all, so that all decide alike.

    Args:
        section: of the job.
        world: the ranks.
        clock: monotonic seconds.
    """

    def __init__(self, section: CheckpointSection, world: World, clock: Callable[[], float] = time.monotonic) -> None:
        self._section, self._world, self._clock = section, world, clock
        self._last = clock()
        self._costs: deque[float] = deque(maxlen=_COSTS)

    def due(self, step: int) -> bool:
        """Whether to save after ``step``; all ranks ask together."""
        section = self._section
        if section.every is not None and step % section.every == 0:
            return True
        if section.interval is None:
            return False
        return bool(self._world.broadcast(self._clock() - self._last >= self.interval))

    def saved(self, cost: float) -> None:
        """A checkpoint was begun now, and training stood still for ``cost`` seconds."""
        self._last = self._clock()
        self._costs.append(cost)

    @property
    def interval(self) -> float:
        """Seconds between two checkpoints, as this rank sees it."""
        section = self._section
        if isinstance(section.interval, float):
            return section.interval
        if not self._costs:
            return _FIRST_SECONDS
        assert section.mtbf_hours is not None  # the job was checked
        return young_interval(sorted(self._costs)[len(self._costs) // 2], 3600.0 * section.mtbf_hours)
