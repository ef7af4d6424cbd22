"""A run with failures, event by event: what the closed forms of ``plan.goodput`` and ``plan.spares`` are held against.

It shares no formula with them: it draws failures, trains checkpoint interval by checkpoint interval, loses what was not
finished when a failure comes, waits for devices to come back from repair, and adds up where the wall went. It also
answers what they cannot: failures and spares together, where a failure both undoes work and takes a device away.

A device that comes back while fewer replicas train joins at the next checkpoint, at no cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from meshwright.errors import InputError
from meshwright.plan.goodput import Reliability
from meshwright.plan.quantities import above_zero, at_least_zero
from meshwright.plan.spares import running_rate

_HISTORIES = 32
"""Independent runs whose scatter gives the confidence interval."""
_STUDENT_95 = 2.0395
"""Quantile of Student's t, 31 degrees of freedom."""
KINDS = ("kept", "stall", "replay", "detection", "restart", "idle", "degraded")
"""Where the wall goes: ``idle``: waiting for a device; ``degraded``: what missing replicas would have trained."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The devices behind a run; the default never lacks one."""

    repair: float = 0.0
    """Seconds until a failed device is back."""
    spares: int = 0
    replicas: int = 1
    """Data-parallel replicas that go on without one another; 1: the run waits."""

    def __post_init__(self) -> None:
        at_least_zero("repair", self.repair, "seconds")
        if self.spares < 0:
            raise InputError(f"spares: {self.spares} is below 0; use 0 or more")
        if self.replicas < 1:
            raise InputError(f"replicas: {self.replicas} cannot train; use 1 or more")


class Simulated(BaseModel):
    """What the simulated runs show."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    goodput: float
    """Kept training over wall, of all runs together."""
    low: float
    """Lower end of its 95 % confidence interval."""
    high: float
    failures: int
    """How many were drawn."""
    shares: dict[str, float]
    """Where the wall went, by ``KINDS``; sums to 1."""


class _Done(NamedTuple):
    """Seconds of wall by what they became, since training resumed."""

    work: float = 0.0
    stall: float = 0.0
    degraded: float = 0.0

    def plus(self, work: float, stall: float, degraded: float) -> _Done:
        return _Done(self.work + work, self.stall + stall, self.degraded + degraded)


@dataclass
class _History:
    """One run: its clock and where the time has gone so far."""

    reliability: Reliability
    interval: float
    pool: Pool
    training: bool = False
    """It begins with training, not with the coming back from a failure."""
    clock: float = 0.0
    away: deque[float] = field(default_factory=deque)
    """When each failed device will be back, soonest first (all repairs take equally long)."""
    wall: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    def live_until(self, failure: float, *, saved: bool = False) -> None:
        """From one failure to the next: come back, train, lose what is not finished, lose a device.

        ``saved``: it is no failure but the end of the run, which keeps all that was trained until then.
        """
        if self._comes_back(failure):
            self._trains_until(failure, saved=saved)
        self.clock = failure
        if self.pool.repair:
            self.away.append(failure + self.pool.repair)

    def _comes_back(self, failure: float) -> bool:
        """Detection, waiting for enough devices, restart; whether all of it ends before the next failure."""
        if self.training:
            self.training = False
            return True
        self._spend("detection", self.clock + self.reliability.detection, failure)
        missing = self._missing()
        if running_rate(missing, self.pool.replicas) == 0:
            # one replica can train again once this many are back; where there is but one, it must be whole
            must_return = missing - (self.pool.replicas - 1)
            self._spend("idle", self.away[must_return - 1], failure)
        self._spend("restart", self.clock + self.reliability.restart, failure)
        return self.clock < failure

    def _spend(self, kind: str, until: float, failure: float) -> None:
        until = min(until, failure)
        self.wall[kind] += until - self.clock
        self.clock = until

    def _missing(self) -> int:
        """Devices without a spare, now."""
        while self.away and self.away[0] <= self.clock:
            self.away.popleft()
        return max(0, len(self.away) - self.pool.spares)

    def _trains_until(self, failure: float, *, saved: bool) -> None:
        """Interval by interval; what is not finished when the failure comes is lost, unless it is ``saved``."""
        began, done, kept = self.clock, _Done(), _Done()
        interval, stall, write = self.interval, self.reliability.stall, self.reliability.write
        writing: deque[tuple[float, _Done]] = deque()
        while self.clock + interval + stall <= failure:
            missing = self._missing()
            # with all devices there, nothing changes until the failure: all remaining intervals at once
            count = 1 if missing else int((failure - self.clock) / (interval + stall))
            rate = running_rate(missing, self.pool.replicas)
            finished = min(count, max(0, int((failure - write - self.clock) / (interval + stall))))
            for intervals in sorted({finished, count} - {0}):
                after = done.plus(intervals * interval * rate, intervals * stall, intervals * interval * (1 - rate))
                writing.append((self.clock + intervals * (interval + stall) + write, after))
            self.clock += count * (interval + stall)
            done = done.plus(count * interval * rate, count * stall, count * interval * (1 - rate))
        while writing and writing[0][0] <= failure:
            kept = writing.popleft()[1]
        if saved:
            work = min(failure - self.clock, interval)
            rate = running_rate(self._missing(), self.pool.replicas)
            kept = done.plus(work * rate, failure - self.clock - work, work * (1 - rate))
        self.wall["kept"] += kept.work
        self.wall["stall"] += kept.stall
        self.wall["degraded"] += kept.degraded
        self.wall["replay"] += failure - began - sum(kept)


_ALWAYS_WHOLE = Pool()


def live_through(
    reliability: Reliability,
    interval: float,
    moments: Iterable[float],
    end: float,
    pool: Pool = _ALWAYS_WHOLE,
) -> dict[str, float]:
    """A run that fails at given moments, and is saved at its end: what luck did to it is not predicted but known.

    Args:
        reliability: what a failure and a checkpoint take; its ``mtbf`` plays no part.
        interval: training between two checkpoints, seconds.
        moments: of the failures, seconds since training began, in order; later ones than ``end`` do not happen.
        end: seconds since training began.
        pool: spares, repair and replicas.

    Returns:
        Where the wall went, by ``KINDS``; sums to 1.

    Raises:
        InputError: a quantity is impossible.
    """
    above_zero("checkpoint interval", interval, "seconds")
    above_zero("end", end, "seconds")
    failures = [moment for moment in moments if moment < end]
    for before, after in pairwise([0.0, *failures]):
        if not before <= after:
            raise InputError(f"moments: {after:g} s comes after {before:g} s; give seconds from 0 in ascending order")
    history = _History(reliability, interval, pool, training=True)
    for failure in failures:
        history.live_until(failure)
    history.live_until(end, saved=True)
    return {kind: seconds / end for kind, seconds in history.wall.items()}


def simulate(
    reliability: Reliability,
    interval: float,
    pool: Pool = _ALWAYS_WHOLE,
    *,
    failures: int = 20_000,
    seed: int = 0,
) -> Simulated:
    """Live through ``failures`` failures and add up.

    Args:
        reliability: how often it fails and what that takes.
        interval: training between two checkpoints, seconds.
        pool: spares, repair and replicas.
        failures: to draw in all; the interval narrows with their root.
        seed: of the draws; the same seed gives the same result.

    Raises:
        InputError: a quantity is impossible.
    """
    above_zero("checkpoint interval", interval, "seconds")
    if failures < _HISTORIES:
        raise InputError(f"failures: {failures} are too few to tell anything from; use {_HISTORIES} or more")
    each = failures // _HISTORIES
    moments = np.cumsum(np.random.default_rng(seed).exponential(reliability.mtbf, (_HISTORIES, each)), axis=1)
    histories = []
    for row in moments.tolist():
        history = _History(reliability, interval, pool)
        for failure in row:
            history.live_until(failure)
        histories.append(history)
    kept = np.array([history.wall["kept"] for history in histories])
    wall = np.array([history.clock for history in histories])
    goodput = float(kept.sum() / wall.sum())
    # The scatter of a ratio of two sums (delta method).
    error = float(np.std(kept - goodput * wall, ddof=1) * np.sqrt(_HISTORIES) / wall.sum())
    return Simulated(
        goodput=goodput,
        low=goodput - _STUDENT_95 * error,
        high=goodput + _STUDENT_95 * error,
        failures=each * _HISTORIES,
        shares={kind: sum(history.wall[kind] for history in histories) / float(wall.sum()) for kind in KINDS},
    )
