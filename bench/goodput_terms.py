"""What the planner says of a run that fails, in the terms of the run's own ledger: the arithmetic of ``bench.goodput``.

The planner speaks of kept training, stalls and replay, the ledger of useful, checkpoint and replayed seconds. Three
predictions are held against one measured run, from the same few quantities:

    expected    the closed form of ``plan.goodput``: a run without end, with the stated time between failures
    typical     ``plan.failures`` over many runs as long as this one, each with failures of its own: mean and scatter
    relived     ``plan.failures`` with the very moments at which this run failed, so that luck does not enter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwright.plan.failures import live_through
from meshwright.plan.goodput import Reliability, expected_goodput

BOUND = 0.05
"""Of the wall: prediction and measurement agree within it."""
LEDGER = {
    "kept": "useful", "stall": "checkpoint", "replay": "replayed", "detection": "detection", "restart": "restart",
}  # fmt: skip
"""The planner's parts of the wall in the ledger's words; the others do not come up in a run that is always whole."""
_RUNS = 1000
"""Runs that are lived through for the scatter."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Measured apart from the run that is predicted; seconds."""

    step: float
    stall: float
    """For each checkpoint on disk."""
    detection: float
    restart: float


@dataclass(frozen=True, kw_only=True)
class Endured:
    """What became of a run with failures."""

    seconds: float
    """From its first step until its last was saved."""
    failures: tuple[float, ...]
    """Moments, in seconds since the first step began."""
    ledger: Mapping[str, float]
    """Seconds by part, from ``goodput.json``."""
    steps: int
    """That count, at the end."""

    @property
    def shares(self) -> dict[str, float]:
        """Where the wall went while it trained or tried to; before the first step and after the last is not in it."""
        trained = sum(seconds for part, seconds in self.ledger.items() if part != "idle")
        return {part: seconds / trained for part, seconds in self.ledger.items() if part != "idle"}


def mean(measured: Sequence[Terms]) -> Terms:
    """Of each term."""
    names = ("step", "stall", "detection", "restart")
    return Terms(**{name: float(np.mean([getattr(one, name) for one in measured])) for name in names})


def model(terms: Terms, *, mtbf: float, every: int, memory: bool) -> tuple[Reliability, float]:
    """The planner's words for it, and the seconds of training between two states to go back to.

    A survivor hands over the state after its last step: with ``memory`` the run can go back to the end of every step,
    as if it were saved there, and each step bears its part of the stall of the checkpoints on disk.
    """
    steps = 1 if memory else every
    reliability = Reliability(
        mtbf=mtbf, stall=terms.stall * steps / every, detection=terms.detection, restart=terms.restart
    )
    return reliability, steps * terms.step


def typical(reliability: Reliability, interval: float, seconds: float, seed: int = 0) -> tuple[float, float]:
    """Mean goodput of runs of that many seconds, and its standard deviation: what the number of failures allows."""
    draws = np.random.default_rng(seed)
    kept = []
    for _ in range(_RUNS):
        moments, moment = [], draws.exponential(reliability.mtbf)
        while moment < seconds:
            moments.append(moment)
            moment += draws.exponential(reliability.mtbf)
        kept.append(live_through(reliability, interval, moments, seconds)["kept"])
    return float(np.mean(kept)), float(np.std(kept, ddof=1))


def failure_moments(mtbf: float, seconds: float, seed: int) -> list[float]:
    """Seconds from the first step at which a run of that length is to fail: a Poisson process."""
    draws = np.random.default_rng(seed)
    moments: list[float] = []
    while (moment := (moments[-1] if moments else 0.0) + float(draws.exponential(mtbf))) < seconds:
        moments.append(moment)
    return moments


def compared(terms: Terms, endured: Endured, *, mtbf: float, every: int, memory: bool) -> dict[str, Any]:
    """Prediction against measurement, goodput and share by share; shares of the wall from 0 to 1."""
    reliability, interval = model(terms, mtbf=mtbf, every=every, memory=memory)
    relived = live_through(reliability, interval, endured.failures, endured.seconds)
    average, error = typical(reliability, interval, endured.seconds)
    measured = endured.shares
    shares = {
        part: {"predicted": relived[kind], "measured": measured[part], "difference": measured[part] - relived[kind]}
        for kind, part in LEDGER.items()
    }
    return {
        "terms": asdict(terms),
        "interval_s": interval,
        "seconds": endured.seconds,
        "failures": len(endured.failures),
        "moments_s": list(endured.failures),
        "steps": endured.steps,
        "goodput_measured": measured["useful"],
        "goodput_by_steps": endured.steps * terms.step / endured.seconds,
        "goodput_relived": relived["kept"],
        "goodput_typical": average,
        "standard_error": error,
        "goodput_expected": expected_goodput(interval, reliability),
        "shares": shares,
    }


def agrees(found: Mapping[str, Any]) -> bool:
    """Whether the run that was lived through again and the real one agree: in every share, and in the steps done."""
    differences = [abs(share["difference"]) for share in found["shares"].values()]
    return bool(max(*differences, abs(found["goodput_by_steps"] - found["goodput_relived"])) <= BOUND)


def table(name: str, found: Mapping[str, Any]) -> Sequence[str]:
    """For people; points are hundredths of the wall."""
    terms, error = found["terms"], found["standard_error"]
    lines = [
        f"{name}: {found['failures']} failures in {found['seconds']:.0f} s, {found['steps']} steps kept; apart: "
        f"step {terms['step']:.3f} s, checkpoint {terms['stall']:.2f} s, detection {terms['detection']:.2f} s, "
        f"restart {terms['restart']:.2f} s",
        f"  {'of the wall':<14}{'predicted':>11}{'measured':>11}{'difference':>13}",
    ]
    lines += [
        f"  {part:<14}{share['predicted']:>11.1%}{share['measured']:>11.1%}{100 * share['difference']:>+8.1f} points"
        for part, share in found["shares"].items()
    ]
    measured, steps = found["goodput_measured"], found["goodput_by_steps"]
    lines += [
        f"  goodput: ledger {measured:.1%}, steps kept x step time {steps:.1%}; predicted for these failures "
        f"{found['goodput_relived']:.1%}",
        f"  without knowing them: runs as long {found['goodput_typical']:.1%}, standard deviation {100 * error:.1f} "
        f"points; a run without end {found['goodput_expected']:.1%}",
    ]
    return lines
