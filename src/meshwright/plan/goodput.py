"""Checkpoints against failures: how often to save, and which share of the wall is kept training.

Failures come at a constant rate, one in ``mtbf`` seconds (mean time between failures *of the run*: of one device,
divided by the number of devices), whatever the run is doing. After each, ``downtime`` = detection + restart seconds
without a further failure bring the run back to its newest *finished* checkpoint. Between checkpoints lie ``interval``
seconds of training; a checkpoint stops training for ``stall`` seconds and is finished ``write`` seconds after that
(0 when training waits for the whole write: then the stall is the write).

    |== interval ==|stall|== interval ==|stall|== interv X   downtime  |== interval ...
                          '- write -> finished            '- rolls back to the last finished one

Let L = interval + stall, M = mtbf, D = downtime. A failure finds ``(u - write) / L`` whole, finished segments, where u
is the time since training resumed; u + D is exponential, so on average e^(-(D + write)/M) / (e^(L/M) - 1) segments are
kept for every M seconds of wall:

    goodput = (interval / M) * e^(-(D + write) / M) / (e^(L / M) - 1)            exact
            ~ 1 - stall/interval - interval/(2 M) - (D + write)/M                first order

With write = 0 this is Daly's (FGCS 2006, "A higher order estimate of the optimum checkpoint interval"). The best
interval does not depend on D or write: interval = M (1 + W(-e^(-stall/M - 1))), W Lambert's; Young's (1974)
sqrt(2 stall M) and Daly's series approximate it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from meshwright.errors import InputError
from meshwright.plan.quantities import above_zero, at_least_zero


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """How often a run fails and what a failure and a checkpoint take; all in seconds."""

    mtbf: float
    """Between failures of the run, on all its devices together."""
    stall: float
    """Training stands still for this long at each checkpoint."""
    write: float = 0.0
    """From the end of the stall until the checkpoint is finished; 0: training waited for it."""
    detection: float = 0.0
    """From a failure until it is known."""
    restart: float = 0.0
    """From then until training goes on."""

    def __post_init__(self) -> None:
        above_zero("mtbf", self.mtbf, "seconds")
        above_zero("checkpoint cost", self.stall, "seconds")
        at_least_zero("checkpoint write", self.write, "seconds")
        at_least_zero("detection", self.detection, "seconds")
        at_least_zero("restart", self.restart, "seconds")

    @property
    def downtime(self) -> float:
        """Seconds from a failure until training goes on, if nothing else fails meanwhile."""
        return self.detection + self.restart


class Shares(BaseModel):
    """Where the wall goes; the parts sum to 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kept: float
    """Training that counts: the goodput."""
    stall: float
    """Writing the checkpoints between kept work."""
    replay: float
    """Training, and stalls, that a failure undid."""
    detection: float
    restart: float


def mtbf_of_run(device_mtbf: float, devices: int) -> float:
    """Mean time between failures of ``devices`` that fail independently, each once in ``device_mtbf``."""
    if devices < 1:
        raise InputError(f"devices: {devices} cannot fail; use 1 or more")
    return above_zero("device mtbf", device_mtbf, "seconds") / devices


def young_interval(stall: float, mtbf: float) -> float:
    """Young's first-order interval between checkpoints: ``sqrt(2 stall mtbf)``."""
    return math.sqrt(2 * above_zero("checkpoint cost", stall) * above_zero("mtbf", mtbf))


def daly_interval(stall: float, mtbf: float) -> float:
    """Daly's higher-order interval. His figures, with stall 5 min: mtbf 24 h: 117 min, 6 h: 57, 15 min: 9.1."""
    young = young_interval(stall, mtbf)
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def exact_interval(stall: float, mtbf: float) -> float:
    """The interval of highest expected goodput: where ``e^((interval + stall)/mtbf) (1 - interval/mtbf) = 1``.

    In x = interval/mtbf: ln(1 - x) + x + stall/mtbf = 0, falling and concave on (0, 1), so Newton's iteration
    from the right side of the root converges monotonically.
    """
    cost = above_zero("checkpoint cost", stall) / above_zero("mtbf", mtbf)
    if cost > 30:
        return mtbf  # to the last digit
    # 1 - e^(-1 - cost) is beyond the root; sqrt(2 cost) is too, and close when the cost is small.
    x = min(math.sqrt(2 * cost), -math.expm1(-1 - cost))
    for _ in range(60):
        if x < 1e-8:
            break  # the first-order answer, exact to every digit here
        step = (math.log1p(-x) + x + cost) / (-x / (1 - x))
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x * mtbf


def best_interval(reliability: Reliability, step_time: float | None = None) -> float:
    """The exact best interval; in whole steps (at least one) where ``step_time`` is given.

    Of the whole numbers of steps to both sides, the one with the higher expected goodput. A checkpoint begins no
    sooner than the one before is finished.
    """
    interval = max(exact_interval(reliability.stall, reliability.mtbf), reliability.write - reliability.stall)
    if step_time is None:
        return interval
    above_zero("step time", step_time, "seconds")
    fewest = max(1, math.ceil((reliability.write - reliability.stall) / step_time))
    below = max(fewest, math.floor(interval / step_time))
    return max((below * step_time, (below + 1) * step_time), key=lambda one: expected_goodput(one, reliability))


def first_order_goodput(interval: float, reliability: Reliability) -> float:
    """Goodput while everything is short against the mtbf; not below 0."""
    above_zero("checkpoint interval", interval, "seconds")
    one = reliability
    lost = one.stall / interval + (interval / 2 + one.downtime + one.write) / one.mtbf
    return max(0.0, 1 - lost)


def expected_goodput(interval: float, reliability: Reliability) -> float:
    """Exact expected share of the wall that is kept training."""
    return shares(interval, reliability).kept


def shares(interval: float, reliability: Reliability) -> Shares:
    """Where the wall goes, exactly, by the module's formula."""
    above_zero("checkpoint interval", interval, "seconds")
    one, mtbf = reliability, reliability.mtbf
    running = math.exp(-one.downtime / mtbf)
    length = (interval + one.stall) / mtbf
    # segments kept for each mtbf of wall; e^-L / (1 - e^-L) does not overflow where e^L does
    kept = math.exp(-(one.downtime + one.write) / mtbf - length) / -math.expm1(-length)
    detection = -math.expm1(-one.detection / mtbf)
    return Shares(
        kept=kept * interval / mtbf,
        stall=kept * one.stall / mtbf,
        replay=max(0.0, running - kept * length),
        detection=detection,
        restart=1 - running - detection,
    )
