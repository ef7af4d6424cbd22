"""Local SGD: replicas take ``period`` steps by themselves, then all go on from the mean of their parameters.

    x <- sum_r w_r x_r        w_r: tokens of replica r since it last met these others / tokens of all of them

Stich, "Local SGD converges fast and communicates little", ICLR 2019. With a period of 1, plain SGD and one start it is
synchronous SGD: ``sum_r w_r (x - lr g_r) = x - lr sum_r w_r g_r``. With momentum only if the buffers are averaged as
well (``moments``). Hierarchical averaging has a second, shorter period among the replicas of a group (Lin et al.,
"Don't use large mini-batches, use local SGD", ICLR 2020, with post-local SGD: all of this from some step on).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from meshwright.sync.meeting import Exchange, Flat, plain_sum, weight_of


@dataclass
class Level:
    """Some replicas and how often they meet."""

    group: dist.ProcessGroup
    period: int
    tokens: int = field(default=0)
    """What this replica trained on since it last met the others of this level."""


class LocalSgd:
    """Periodic averaging.

    Args:
        values: this replica's parameters, the same part of them on all ranks of each level.
        levels: from the smallest group to all replicas; a larger period is a multiple of a smaller.
        moments: what of the optimizer is averaged with them.
    """

    def __init__(self, values: Sequence[Tensor], levels: Sequence[Level], moments: Sequence[Tensor] = ()) -> None:
        self._values, self._averaged = list(values), [*values, *moments]
        self.levels = list(levels)
        self._moved = False
        """Whether replicas may differ."""

    def count(self, tokens: int) -> None:
        """This replica has trained on ``tokens`` valid tokens more."""
        self._moved = True
        for level in self.levels:
            level.tokens += tokens

    def after(self, step: int, *, last: bool = False) -> bool:
        """Step ``step`` (from 1) has ended; meet if it is time (``last``: all of them). Whether there was a meeting."""
        due = [level for level in self.levels if step % level.period == 0]
        largest = self.levels[-1] if last else due[-1] if due else None
        if largest is None:
            return False
        self._average(self._averaged, largest)
        for level in self.levels[: self.levels.index(largest) + 1]:
            level.tokens = 0
        self._moved = largest is not self.levels[-1]
        return True

    def _average(self, tensors: Sequence[Tensor], level: Level) -> None:
        flat = Flat(tensors, 1)
        if flat.count:
            mean = self._mean(flat, level)
            flat.put(mean)

    def _mean(self, flat: Flat, level: Level) -> Tensor:
        values = flat.gather()
        values.mul_(weight_of(level.tokens, level.group, values.device))
        Exchange(plain_sum(values, level.group)).finish()
        return values

    def model(self) -> list[Tensor]:
        """The model that the replicas stand for now: the mean of all; every rank takes part. Changes nothing."""
        if not self._moved:
            return list(self._values)
        flat = Flat(self._values, 1)
        return flat.parts(self._mean(flat, self.levels[-1])) if flat.count else []

    def settle(self) -> None:
        """Nothing is ever on its way."""

    def restart(self) -> None:
        """Replicas start alike."""
        self._moved = False
        for level in self.levels:
            level.tokens = 0

    def state(self) -> dict[str, list[Tensor]]:
        """What all replicas share besides their parameters: nothing."""
        return {}

    def memory(self) -> list[Tensor]:
        """Long-lived tensors beside the parameters."""
        return []

    def counters(self) -> list[int]:
        """Tokens since the last meetings."""
        return [level.tokens for level in self.levels]

    def resume(self, counters: Sequence[int]) -> None:
        """Take back ``counters`` and ``state``."""
        self._moved = True
        for level, tokens in zip(self.levels, counters, strict=True):
            level.tokens = tokens
