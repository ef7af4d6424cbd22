"""From a step time to the end of the run: checkpoints, failures, spares, goodput, days and cost in one answer."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from meshwright.errors import InputError
from meshwright.plan.days import RunLength, run_length
from meshwright.plan.failures import Pool, Simulated, simulate
from meshwright.plan.goodput import (
    Reliability,
    Shares,
    best_interval,
    daly_interval,
    exact_interval,
    expected_goodput,
    first_order_goodput,
    shares,
    young_interval,
)
from meshwright.plan.quantities import Price, above_zero
from meshwright.plan.spares import cover, expected_rate, spares_needed


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What happens to a failed device."""

    seconds: float
    """Until it is back."""
    confidence: float = 0.999
    """Probability that there is a spare when one is needed."""
    delay: float = 0.0
    """Seconds a restart may wait for a device."""
    spares: int | None = None
    """How many there are; absent: as many as the confidence needs."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is known about a run beside its step."""

    tokens: float | None = None
    reliability: Reliability | None = None
    repair: Repair | None = None
    """Means something only with ``reliability``."""
    replicas: int = 1
    """Data-parallel replicas that go on when one is missing; 1: the run waits for a device."""
    price: Price | None = None
    simulated_failures: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens is not None:
            above_zero("tokens", self.tokens)
        if self.repair is not None and self.reliability is None:
            raise InputError("repair: how many spares it takes depends on how often devices fail; give mtbf too")
        if self.price is not None and self.tokens is None:
            raise InputError(f"price: {self.price} of how many? give the number of tokens to train on too")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Checkpoints(_Part):
    """When to save, and what is left of the wall."""

    mtbf_s: float
    stall_s: float
    write_s: float
    detection_s: float
    restart_s: float
    young_s: float
    """Young's interval."""
    daly_s: float
    """Daly's."""
    exact_s: float
    """That of highest expected goodput."""
    interval_steps: int
    """The best whole number of steps."""
    interval_s: float
    goodput_first_order: float
    goodput: float
    """Expected at ``interval_steps``, with a device always at hand."""
    shares: Shares


class Spares(_Part):
    """Devices beyond those that train."""

    repair_s: float
    delay_s: float
    mean_away: float
    """Failed devices in repair, on average."""
    confidence: float
    needed: int
    """For that confidence."""
    used: int
    cover: float
    """Probability that ``used`` are enough at a random moment."""
    replicas: int
    expected_rate: float
    """Mean speed, 1 when no device is missing."""


class Horizon(_Part):
    """The answer; parts that were not asked for are absent."""

    step_time_s: float
    devices: int
    """That train."""
    checkpoints: Checkpoints | None = None
    spares: Spares | None = None
    goodput: float
    """Share of the wall that is kept training; 1 when failures were not asked about."""
    simulated: Simulated | None = None
    """The same, lived through event by event."""
    run: RunLength | None = None


def horizon(question: Question, *, step_time: float, tokens_per_step: float, devices: int) -> Horizon:
    """Answer for one step time.

    Args:
        question: what is known.
        step_time: seconds.
        tokens_per_step: global batch times sequence length.
        devices: that train.

    Raises:
        InputError: a quantity is impossible.
    """
    above_zero("step time", step_time, "seconds")
    checkpoints = spares = simulated = None
    goodput = 1.0
    if question.reliability is not None:
        checkpoints = _checkpoints(question.reliability, step_time)
        goodput = checkpoints.goodput
        pool = Pool(replicas=question.replicas)
        if question.repair is not None:
            spares = _spares(question.reliability, question.repair, question.replicas)
            goodput *= spares.expected_rate
            pool = Pool(repair=question.repair.seconds, spares=spares.used, replicas=question.replicas)
        simulated = simulate(
            question.reliability,
            checkpoints.interval_s,
            pool,
            failures=question.simulated_failures,
            seed=question.seed,
        )
    run = None
    if question.tokens is not None:
        occupied = devices + (spares.used if spares else 0)
        run = run_length(question.tokens, tokens_per_step, step_time, occupied, goodput=goodput, price=question.price)
    return Horizon(
        step_time_s=step_time,
        devices=devices,
        checkpoints=checkpoints,
        spares=spares,
        goodput=goodput,
        simulated=simulated,
        run=run,
    )


def _checkpoints(reliability: Reliability, step_time: float) -> Checkpoints:
    interval = best_interval(reliability, step_time)
    return Checkpoints(
        mtbf_s=reliability.mtbf,
        stall_s=reliability.stall,
        write_s=reliability.write,
        detection_s=reliability.detection,
        restart_s=reliability.restart,
        young_s=young_interval(reliability.stall, reliability.mtbf),
        daly_s=daly_interval(reliability.stall, reliability.mtbf),
        exact_s=exact_interval(reliability.stall, reliability.mtbf),
        interval_steps=round(interval / step_time),
        interval_s=interval,
        goodput_first_order=first_order_goodput(interval, reliability),
        goodput=expected_goodput(interval, reliability),
        shares=shares(interval, reliability),
    )


def _spares(reliability: Reliability, repair: Repair, replicas: int) -> Spares:
    needed = spares_needed(reliability.mtbf, repair.seconds, repair.confidence, delay=repair.delay)
    used = needed if repair.spares is None else repair.spares
    return Spares(
        repair_s=repair.seconds,
        delay_s=repair.delay,
        mean_away=repair.seconds / reliability.mtbf,
        confidence=repair.confidence,
        needed=needed,
        used=used,
        cover=cover(reliability.mtbf, repair.seconds, used),
        replicas=replicas,
        expected_rate=expected_rate(reliability.mtbf, repair.seconds, used, replicas),
    )


def measured_checkpoint_cost(run_dir: Path) -> float:
    """Median seconds that the checkpoints of a run took, from its ``events.jsonl``.

    Raises:
        InputError: there is no such file, or no checkpoint with a time in it.
    """
    path = run_dir / "events.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give the directory of a run, or a time as 30s") from error
    seconds: list[float] = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}: line {number} is not JSON ({error.msg}); expected what a run wrote") from error
        if isinstance(event, dict) and event.get("event") == "saved" and isinstance(event.get("seconds"), float):
            seconds.append(event["seconds"])
    if not seconds or not math.isfinite(sum(seconds)):
        raise InputError(f"{path}: no checkpoint of this run has a time; train with checkpoints, or give a time as 30s")
    return statistics.median(seconds)
