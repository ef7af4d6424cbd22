"""Compare with peers: `python -m bench.peers` (or `make bench`, which installs them first).

Every contestant of a family lives through the whole comparison as a set of rank processes that sleep until called.
A round calls each of them once, in an order that rotates; ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.contestants import FAMILIES, ONE_DEVICE, SCHEDULES, Contestant
from bench.crew import Crew, CrewFailure, clear_stale_locks
from bench.statistics import Ratio, median, paired_ratio
from bench.workload import Workload

# All start from the same values on the same data, so their losses must be the same up to rounding. Looked at over
# the first steps: AdamW turns rounding noise of tiny gradients into whole steps, so trajectories part slowly.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
STEPS_COMPARED = 6


@dataclass
class Measured:
    """What one contestant did."""

    contestant: Contestant
    seconds: list[float] = field(default_factory=list)
    """Per step, one value a round: of the slowest rank."""
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """Of the rank that needs most."""
    base_bytes: int = 0
    """Of the same, before the contestant was built."""

    def as_json(self, work: Workload) -> dict[str, Any]:
        """Figures and raw rounds."""
        return {
            "name": self.contestant.name,
            "tokens_per_second": work.tokens_per_step / median(self.seconds),
            "seconds_per_step": self.seconds,
            "cpu_seconds_per_step": self.cpu_seconds,
            "peak_bytes": self.peak_bytes,
            "base_bytes": self.base_bytes,
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
        }


@dataclass
class Comparison:
    """One family at one dtype."""

    family: str
    work: Workload
    ranks: int
    measured: list[Measured]
    failures: list[str] = field(default_factory=list)

    @property
    def ours(self) -> Measured | None:
        """Our own contestant, if it ran."""
        return next((one for one in self.measured if one.contestant.ours), None)

    @property
    def peers(self) -> list[Measured]:
        """The others, fastest first, without the one device."""
        others = [one for one in self.measured if not one.contestant.ours and not one.contestant.one_rank]
        return sorted(others, key=lambda one: median(one.seconds))

    @property
    def one_device(self) -> Measured | None:
        """The same work in one process."""
        return next((one for one in self.measured if one.contestant.one_rank), None)

    def ratio(self, other: Measured) -> Ratio | None:
        """How many times faster we are than ``other``."""
        return None if self.ours is None else paired_ratio(other.seconds, self.ours.seconds)

    @property
    def disagreement(self) -> float:
        """Largest relative difference of any contestant's losses to the median contestant's, over the first steps."""
        steps = zip(*(one.losses[:STEPS_COMPARED] for one in self.measured), strict=True)
        return max((abs(loss - median(losses)) / abs(median(losses)) for losses in steps for loss in losses), default=0)

    @property
    def agree(self) -> bool:
        """Whether all did the same work."""
        return self.disagreement <= LOSS_TOLERANCE[self.work.dtype]

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        best = self.peers[0] if self.peers else None
        ratio = None if best is None else self.ratio(best)
        return {
            "family": self.family,
            "ranks": self.ranks,
            "workload": asdict(self.work),
            "best_peer": None if best is None else best.contestant.name,
            "speed_against_best_peer": None if ratio is None else asdict(ratio),
            "loss_disagreement": self.disagreement,
            "agree": self.agree,
            "contestants": [one.as_json(self.work) for one in self.measured],
            "failures": self.failures,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    ranks: int = 2
    rounds: int = 7
    steps: int = 3
    warm_up: int = 3
    threads: int = 1
    patience: float = 600.0


def compare(
    family: str, contestants: Sequence[Contestant], work: Workload, plan: Plan, say: Callable[[str], None]
) -> Comparison:
    """Run one family's rounds. A contestant that cannot be built or fails is named and left out."""
    crews: list[tuple[Crew, Measured]] = []
    comparison = Comparison(family, work, plan.ranks, [])
    try:
        for contestant in contestants:
            try:
                crew = Crew(contestant, work, plan.ranks, threads=plan.threads, patience=plan.patience)
            except CrewFailure as failure:
                _leave_out(comparison, failure, say)
                continue
            crews.append((crew, Measured(contestant, base_bytes=max(crew.base_bytes))))
        for turn in range(-1, plan.rounds):
            start = turn % max(1, len(crews))
            for crew, measured in [*crews[start:], *crews[:start]]:
                try:
                    _one_turn(crew, measured, plan.warm_up if turn < 0 else plan.steps, timed=turn >= 0)
                except CrewFailure as failure:
                    crews.remove((crew, measured))
                    _leave_out(comparison, failure, say)
            say(f"{family}, {work.dtype}: " + ("warmed up" if turn < 0 else f"round {turn + 1} of {plan.rounds}"))
    finally:
        for crew, _ in crews:
            crew.close()
    comparison.measured = [measured for _, measured in crews]
    return comparison


def _one_turn(crew: Crew, measured: Measured, steps: int, *, timed: bool) -> None:
    replies = crew.steps(steps)
    for losses in zip(*(reply.losses for reply in replies), strict=True):
        known = [loss for loss in losses if loss is not None]
        measured.losses.append(sum(known) / len(known))
    measured.peak_bytes = max(reply.peak_bytes for reply in replies)
    if timed:
        measured.seconds.append(max(reply.wall_seconds for reply in replies) / steps)
        measured.cpu_seconds.append(max(reply.cpu_seconds for reply in replies) / steps)


def _leave_out(comparison: Comparison, failure: CrewFailure, say: Callable[[str], None]) -> None:
    comparison.failures.append(str(failure))
    say(f"left out: {failure}")


def best_schedules(results: Sequence[Comparison]) -> tuple[Contestant, ...]:
    """The fastest schedule of ours and of the peers among the pipeline families."""
    ours = [result.ours for result in results if result.ours is not None]
    theirs = [result.peers[0] for result in results if result.peers]
    return tuple(min(side, key=lambda one: median(one.seconds)).contestant for side in (ours, theirs) if side)


def table(comparison: Comparison) -> str:
    """One family as text: tokens/s, our speed over theirs, share of the ideal, memory."""
    work, one = comparison.work, comparison.one_device
    lines = [
        f"{comparison.family}, {work.dtype}, {comparison.ranks} ranks"
        + ("" if comparison.agree else f"   LOSSES DIFFER by {comparison.disagreement:.1e}"),
        f"  {'':<30}{'tokens/s':>9}  {'cpu s/step':>10}  {'of ideal':>8}  {'peak MB':>7}  {'own MB':>6}"
        "  speed of ours over it",
    ]
    for measured in sorted(comparison.measured, key=lambda one: median(one.seconds)):
        seconds = median(measured.seconds)
        # The ideal is the one-device step split over the ranks; one device itself is its own ideal.
        ranks = 1 if measured.contestant.one_rank else comparison.ranks
        ideal = "" if one is None else f"{median(one.seconds) / ranks / seconds:.0%}"
        ratio = None if measured.contestant.ours else comparison.ratio(measured)
        lines.append(
            f"  {measured.contestant.name:<30}{work.tokens_per_step / seconds:>9.0f}"
            f"  {median(measured.cpu_seconds):>10.3f}  {ideal:>8}  {measured.peak_bytes / 1e6:>7.0f}"
            f"  {(measured.peak_bytes - measured.base_bytes) / 1e6:>6.0f}  {ratio or ''}"
        )
    lines += [f"  left out: {_first_and_last(failure)}" for failure in comparison.failures]
    return "\n".join(lines)


def _first_and_last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}"


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    import torch

    processor = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def run(families: Sequence[str], dtypes: Sequence[str], plan: Plan, say: Callable[[str], None]) -> list[Comparison]:
    """All families at all dtypes; pipelines schedule by schedule, then the best of both sides against each other."""
    clear_stale_locks()
    results: list[Comparison] = []
    for dtype in dtypes:
        work = Workload(dtype=dtype)  # type: ignore[arg-type]
        for family in families:
            results.append(compare(family, (*FAMILIES[family], ONE_DEVICE), work, plan, say))
            say("\n" + table(results[-1]) + "\n")
        pipelines = [one for one in results if one.family.startswith("pp ") and one.work.dtype == dtype]
        if len(pipelines) > 1:
            results.append(compare("pp, best schedules", (*best_schedules(pipelines), ONE_DEVICE), work, plan, say))
            say("\n" + table(results[-1]) + "\n")
    return results


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: measured; 1: a contestant did other work or failed."""
    parser = argparse.ArgumentParser(description="Compare meshwright with its peers in one interleaved run.")
    parser.add_argument("--families", nargs="+", default=["dp", "zero3", "tp", "pp"], help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--ranks", type=int, default=Plan.ranks)
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--steps", type=int, default=Plan.steps, help="steps each contestant takes in a round")
    parser.add_argument("--threads", type=int, default=Plan.threads, help="computing threads a rank")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output; progress on error")
    options = parser.parse_args(arguments)
    families = [name for given in options.families for name in _expand(given, parser)]
    plan = Plan(ranks=options.ranks, rounds=options.rounds, steps=options.steps, threads=options.threads)
    stream = sys.stderr if options.json else sys.stdout
    results = run(families, options.dtypes, plan, lambda text: print(text, file=stream, flush=True))
    if options.json:
        print(json.dumps({"machine": machine(), "results": [result.as_json() for result in results]}))
    return 0 if all(result.agree and not result.failures for result in results) else 1


def _expand(given: str, parser: argparse.ArgumentParser) -> Sequence[str]:
    if given == "pp":
        return [f"pp {schedule}" for schedule in SCHEDULES]
    if given not in FAMILIES:
        parser.error(f"{given!r} is no family; use pp, or of {', '.join(FAMILIES)}")
    return [given]


if __name__ == "__main__":
    sys.exit(main())
