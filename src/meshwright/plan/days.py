"""From steps to days: how long a token budget takes, what it occupies and what it costs.

A step moves ``global batch x sequence`` tokens; a run of ``tokens`` takes ``ceil(tokens / that)`` steps; its wall
time is ``steps x step time / goodput``, where goodput is the share of the wall that ends up as kept training
(``plan.goodput``).
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict

from meshwright.errors import InputError
from meshwright.plan.quantities import DAY, HOUR, Price, above_zero


class RunLength(BaseModel):
    """What a token budget takes under one step time."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tokens: float
    steps: int
    step_time_s: float
    goodput: float
    """Share of the wall that is kept training; 1: no failures and no checkpoints."""
    devices: int
    """Devices that are paid for: those that train and the spares."""
    seconds: float
    """Wall time."""
    cost: float | None = None
    """In ``currency``; absent without a price."""
    currency: str | None = None

    @property
    def days(self) -> float:
        """Wall time in days."""
        return self.seconds / DAY

    @property
    def device_hours(self) -> float:
        """Hours over all devices."""
        return self.seconds * self.devices / HOUR


def run_length(
    tokens: float,
    tokens_per_step: float,
    step_time: float,
    devices: int,
    *,
    goodput: float = 1.0,
    price: Price | None = None,
) -> RunLength:
    """How long a run is, and what it costs.

    Args:
        tokens: the budget; the last step is a whole one.
        tokens_per_step: global batch times sequence length.
        step_time: seconds.
        devices: that are occupied, spares included.
        goodput: share of the wall that is kept training, above 0 and at most 1.
        price: of one device and hour.

    Raises:
        InputError: a quantity is impossible.
    """
    above_zero("tokens", tokens)
    above_zero("tokens a step", tokens_per_step)
    above_zero("step time", step_time, "seconds")
    if devices < 1:
        raise InputError(f"devices: {devices} cannot train; use 1 or more")
    if not 0 < goodput <= 1:
        raise InputError(f"goodput: {goodput:g} is not above 0 and at most 1; nothing would ever be trained")
    steps = math.ceil(tokens / tokens_per_step)
    seconds = steps * step_time / goodput
    cost = None if price is None else price.amount * devices * seconds / HOUR
    return RunLength(
        tokens=tokens,
        steps=steps,
        step_time_s=step_time,
        goodput=goodput,
        devices=devices,
        seconds=seconds,
        cost=cost,
        currency=None if price is None else price.currency,
    )
