"""Elastic averaging SGD: every replica is drawn to a center, and the center to the replicas; they never become equal.

Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015, equations 3 to 5. Every
``period`` steps, with d_r = x_r - c taken before either moves:

    x_r <- x_r - a d_r        c <- c + a sum_r d_r        0 < a, and a R <= 1 for R replicas

Nothing is gained or lost: ``c + sum_r x_r`` is the same before and after. The center is the model: it is what is
validated, and what a checkpoint calls the parameters. Replicas count alike, whatever their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from meshwright.sync.meeting import Exchange, Flat, plain_sum


def elastic(values: Tensor, center: Tensor, total: Tensor, strength: float) -> None:
    """Move ``values`` (x_r) and ``center`` (c), in place; ``total`` is the sum over replicas of ``x_r - c``."""
    values.lerp_(center, strength)
    center.add_(total, alpha=strength)


class Easgd:
    """Elastic averaging.

    Args:
        values: this replica's parameters; the center starts from them.
        group: the replicas.
        period: steps between meetings.
        strength: a.
    """

    def __init__(self, values: Sequence[Tensor], group: dist.ProcessGroup, period: int, strength: float) -> None:
        self._flat = Flat(values, 1)
        self._group, self._period, self._strength = group, period, strength
        self._center = self._flat.gather()

    def count(self, tokens: int) -> None:
        """Replicas count alike."""

    def after(self, step: int, *, last: bool = False) -> bool:
        """Step ``step`` (from 1) has ended; meet if it is time (or the ``last``). Whether there was a meeting."""
        if step % self._period and not last:
            return False
        if self._flat.count:
            values = self._flat.gather()
            total = values - self._center
            Exchange(plain_sum(total, self._group)).finish()
            elastic(values, self._center, total, self._strength)
            self._flat.put(values)
        return True

    def model(self) -> list[Tensor]:
        """The center."""
        return self._flat.parts(self._center)

    def settle(self) -> None:
        """Nothing is ever on its way."""

    def restart(self) -> None:
        """The center starts from the replica's parameters."""
        self._center.copy_(self._flat.gather())

    def state(self) -> dict[str, list[Tensor]]:
        """The center is the model; there is nothing besides."""
        return {}

    def memory(self) -> list[Tensor]:
        """Long-lived tensors beside the parameters."""
        return [self._center]

    def counters(self) -> list[int]:
        """None are kept."""
        return []

    def resume(self, counters: Sequence[int]) -> None:
        """Nothing to take back."""
