"""Dynamic loss scaling for float16: one scale, moved by a decision all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_SCALE = 2.0**-24
"""float16's smallest number: a scale below it rescues no gradient, so it falls no further."""


@dataclass
class LossScale:
    """The factor on the loss that keeps small float16 gradients from vanishing (Micikevicius et al. 2018).

    It is moved by ``update`` alone, with the agreed "was any gradient of any rank not finite", so the
    scales of two ranks cannot part.
    """

    value: float = 1.0
    growth_interval: int = 2000
    enabled: bool = False
    good_steps: int = 0

    def update(self, *, finite: bool) -> None:
        """Halve after an overflow; double after ``growth_interval`` good steps in a row."""
        if not self.enabled:
            return
        if not finite:
            self.value = max(self.value * 0.5, SMALLEST_SCALE)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value *= 2.0
            self.good_steps = 0
