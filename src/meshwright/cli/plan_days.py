"""The sections of ``meshwright plan`` behind the step: checkpoints, failures, spares, days and cost.

How the verb uses it::

    options = DaysOptions(tokens=..., mtbf=..., ...)       # the texts of its command-line options, None where absent
    question = options.question(devices)                   # None: nothing of it was asked; InputError: impossible
    answer = horizon(question, step_time=..., tokens_per_step=..., devices=...)
    print_days(console, answer)                            # or answer.model_dump() under "days" in --json
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console

from meshwright.errors import InputError
from meshwright.job.cluster import ClusterSpec
from meshwright.plan.goodput import Reliability, mtbf_of_run
from meshwright.plan.horizon import Horizon, Question, Repair, measured_checkpoint_cost
from meshwright.plan.quantities import parse_duration, parse_price, show_duration

HELP = {
    "tokens": "Train on this many: days, device-hours, cost.",
    "mtbf": "Mean time between failures of the run, as 3.1h; of one device, as 50700h/device.",
    "checkpoint_cost": "Training stands still this long at a checkpoint, as 30s; or a run directory: as it measured.",
    "checkpoint_write": "From then until an asynchronous checkpoint is finished, as 2min.",
    "detection": "From a failure until it is known, as 30s.",
    "restart": "From then until training goes on, as 5min.",
    "repair": "Until a failed device is back, as 24h: how many spares.",
    "restart_delay": "A restart may wait this long for a device.",
    "confidence": "Probability that a spare is there.",
    "spares": "How many there are; absent: as many as the confidence needs.",
    "elastic": "Replicas go on while one is missing.",
    "price": "Of one device and hour, as '2.10 USD'.",
}
"""What the options say in ``--help``, by field of :class:`DaysOptions`."""

_WITHOUT_FAILURES = {"--tokens", "--price"}
"""Options that mean something where nothing fails."""


@dataclass(frozen=True, kw_only=True)
class DaysOptions:
    """The options as they were typed; ``HELP`` explains each."""

    tokens: float | None = None
    mtbf: str | None = None
    checkpoint_cost: str | None = None
    checkpoint_write: str | None = None
    detection: str | None = None
    restart: str | None = None
    repair: str | None = None
    restart_delay: str | None = None
    confidence: float = 0.999
    spares: int | None = None
    elastic: bool = False
    price: str | None = None

    def question(self, devices: int, replicas: int = 1) -> Question | None:
        """What is asked about a layout of ``devices`` and ``replicas``; None when nothing is.

        Raises:
            InputError: an option is no quantity, or stands without the one that gives it a meaning.
        """
        reliability = self._reliability(devices)
        if self.tokens is None and reliability is None and self.price is None:
            return None
        repair = None
        if self.repair is not None:
            repair = Repair(
                seconds=parse_duration(self.repair, "--repair"),
                confidence=self.confidence,
                delay=_seconds(self.restart_delay, "--restart-delay"),
                spares=self.spares,
            )
        return Question(
            tokens=self.tokens,
            reliability=reliability,
            repair=repair,
            replicas=replicas if self.elastic else 1,
            price=None if self.price is None else parse_price(self.price),
        )

    def with_defaults(self, machines: ClusterSpec) -> DaysOptions:
        """The same, with what the cluster file says where the options given have a use for it."""
        price, mtbf = self.price, self.mtbf
        if price is None and self.tokens is not None:
            price = machines.price_per_device_hour
        if mtbf is None and machines.mtbf_device_hours is not None and set(self.given()) - _WITHOUT_FAILURES:
            mtbf = f"{machines.mtbf_device_hours}h/device"
        return replace(self, price=price, mtbf=mtbf)

    def given(self) -> list[str]:
        """The options that were given, as they are typed."""
        changed = (one.name for one in fields(self) if getattr(self, one.name) != one.default)
        return ["--" + name.replace("_", "-") for name in changed]

    def _reliability(self, devices: int) -> Reliability | None:
        if self.mtbf is None:
            for option in self.given():
                if option not in _WITHOUT_FAILURES:
                    raise InputError(f"{option}: without --mtbf nothing fails; give --mtbf, as 3.1h or 50700h/device")
            return None
        if self.repair is None:
            for option in self.given():
                if option in ("--restart-delay", "--confidence", "--spares"):
                    raise InputError(f"{option}: without --repair nothing comes back; give --repair, as 24h")
        if self.checkpoint_cost is None:
            raise InputError("--mtbf: what a failure costs depends on checkpoints; give --checkpoint-cost, as 30s")
        return Reliability(
            mtbf=parse_mtbf(self.mtbf, devices),
            stall=_checkpoint_cost(self.checkpoint_cost),
            write=_seconds(self.checkpoint_write, "--checkpoint-write"),
            detection=_seconds(self.detection, "--detection"),
            restart=_seconds(self.restart, "--restart"),
        )


def parse_mtbf(text: str, devices: int) -> float:
    """``3.1h`` of the run, or ``50700h/device``: seconds between failures of a run on ``devices``."""
    amount, slash, per = text.partition("/")
    if slash and per.strip() != "device":
        raise InputError(f"--mtbf: {text!r} is per {per.strip()!r}; write 3.1h for the run, or 50700h/device")
    seconds = parse_duration(amount, "--mtbf")
    if seconds <= 0:
        raise InputError(f"--mtbf: {text!r} is no time between failures; use a time above 0, as 3.1h")
    return mtbf_of_run(seconds, devices) if slash else seconds


def _seconds(text: str | None, where: str) -> float:
    return 0.0 if text is None else parse_duration(text, where)


def _checkpoint_cost(text: str) -> float:
    if Path(text).is_dir():
        return measured_checkpoint_cost(Path(text))
    seconds = parse_duration(text, "--checkpoint-cost")
    if seconds <= 0:
        raise InputError(f"--checkpoint-cost: {text!r} would make saving free; use a time above 0, as 30s")
    return seconds


def print_days(console: Console, answer: Horizon) -> None:
    """The sections as text."""
    for line in days_lines(answer):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def days_lines(answer: Horizon) -> list[str]:
    """The sections, one line each."""
    lines = []
    if one := answer.checkpoints:
        lines += [
            f"failures      one in {show_duration(one.mtbf_s)} on {answer.devices:,} devices",
            f"checkpoint    every {one.interval_steps:,} steps = {show_duration(one.interval_s)} (Young "
            f"{show_duration(one.young_s)}, Daly {show_duration(one.daly_s)}, exact {show_duration(one.exact_s)}); "
            f"stall {show_duration(one.stall_s)}",
        ]
        lost = one.shares
        lines.append(
            f"goodput       {one.goodput:.2%} expected (first order {one.goodput_first_order:.2%}); lost: checkpoints "
            f"{lost.stall:.2%}, work done again {lost.replay:.2%}, detection {lost.detection:.2%}, "
            f"restart {lost.restart:.2%}"
        )
    if (spare := answer.spares) is not None:
        lines.append(
            f"spares        {spare.used} cover {spare.cover:.3%} of the time ({spare.needed} needed for "
            f"{spare.confidence:.4g}; {spare.mean_away:.2f} devices away on average); mean speed "
            f"{spare.expected_rate:.2%}" + (f" with {spare.replicas} replicas that go on" if spare.replicas > 1 else "")
        )
    if (seen := answer.simulated) is not None:
        lines.append(
            f"simulated     {seen.goodput:.2%}, 95 % interval {seen.low:.2%} to {seen.high:.2%}, over "
            f"{seen.failures:,} failures; expected {answer.goodput:.2%}"
        )
    if (run := answer.run) is not None:
        money = "" if run.cost is None else f", {run.cost:,.0f} {run.currency}"
        lines.append(
            f"run           {run.tokens:.4g} tokens: {run.steps:,} steps of {show_duration(run.step_time_s)}, "
            f"{run.days:.4g} days, {run.device_hours:,.0f} device-hours on {run.devices:,} devices{money}"
        )
    return lines
