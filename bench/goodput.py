"""The planner's goodput against that of a run that fails again and again: `python -m bench.goodput [--json]`.

Four ranks, about ten million parameters, data parallel, as in ``bench.recovery``. A random rank is killed (kill -9) at
exponentially distributed times, once with recovery from disk, so that steps are lost and done again, and once from the
memory of the others. What the run's ledger (``goodput.json``) says is held against the planner: see
``bench.goodput_terms``. What the planner is told was measured apart, in a run before and a run after that one (a
machine that others use does not stay as fast as it was): the step time and the cost of a checkpoint while nothing
happens, then detection and restart of a few kills, long enough apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.goodput_terms import BOUND, Endured, Terms, agrees, compared, failure_moments, mean, table
from bench.recovery import RANKS, Run, events, ours
from meshwright.plan.horizon import measured_checkpoint_cost
from meshwright.recovery.monitor import process_state

_WARM = 6
"""Steps after a start that are slower than the others: first allocations, the two that the run's ledger records."""
_END_SECONDS = 60.0
"""That a run has to save and stop."""
_MEMORY = {"disk": False, "memory": True}
"""How a run comes back, and ``recovery.memory``."""


def begun(folder: Path, name: str, every: int, *, memory: bool) -> Run:
    """A run that is never given up."""
    return ours(
        folder, name, f"checkpoint.every={every}", f"recovery.memory={str(memory).lower()}", "recovery.restarts=1000"
    )


def rows(out: Path) -> list[dict[str, Any]]:
    """The steps that count, as the run wrote them down."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def ended(run: Run, out: Path) -> dict[str, float]:
    """Ask a run to save and stop; its ledger, in seconds by part."""
    run.process.send_signal(signal.SIGTERM)
    run.process.wait(_END_SECONDS)
    ledger: dict[str, float] = json.loads((out / "goodput.json").read_text(encoding="utf-8"))["seconds"]
    return ledger


def apart(folder: Path, name: str, calm: float, kills: int, every: int, *, memory: bool) -> Terms:
    """Of a run of its own: step time and checkpoint cost while nothing happens to it, then a few kills, one by one."""
    out = folder / name
    run = begun(folder, name, every, memory=memory)
    choice = random.Random(0)
    try:
        run.wait(lambda: run.step() > _WARM)
        time.sleep(calm)
        run.wait(lambda: run.step() > every)  # there is a checkpoint to load
        undisturbed = rows(out)
        for number in range(1, kills + 1):
            kill_one(out, choice)
            run.wait(lambda number=number: len(events(out, "recovered")) == number)  # type: ignore[misc]
            reached = run.step()
            run.wait(lambda reached=reached: run.step() > reached + _WARM)  # type: ignore[misc]
        ledger = ended(run, out)
    finally:
        run.close()
    return Terms(
        step=step_seconds(undisturbed, every), stall=measured_checkpoint_cost(out),
        detection=ledger["detection"] / kills, restart=ledger["restart"] / kills,
    )  # fmt: skip


def step_seconds(steps: Sequence[dict[str, Any]], every: int) -> float:
    """Mean time from the end of a step to the end of the next, where no checkpoint lies between."""
    gaps = [
        after["time"] - before["time"]
        for before, after in pairwise(steps)
        if before["step"] % every and before["step"] > _WARM
    ]
    return statistics.fmean(gaps)


def kill_one(out: Path, choice: random.Random) -> float:
    """Kill a random rank, as soon as there is one to kill; when that was, in seconds since the epoch."""
    while True:
        attempts = sorted((out / "logs").glob("attempt-*"), key=lambda path: int(path.name.removeprefix("attempt-")))
        said = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(attempts[-1].glob("rank-*.json"))]
        alive = [one["pid"] for one in said if process_state(one["pid"]) not in ("", "Z", "X")]
        if alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(choice.choice(alive), signal.SIGKILL)
                return time.time()
        time.sleep(0.005)


def accelerated(folder: Path, moments: Sequence[float], seconds: float, every: int, *, memory: bool) -> Endured:
    """A run that fails at these moments (seconds since its first step began), and is saved after ``seconds``."""
    out = folder / f"fails-{'memory' if memory else 'disk'}"
    run = begun(folder, out.name, every, memory=memory)
    choice = random.Random(1)
    failures = []
    try:
        run.wait(lambda: run.step() > 0)
        first = rows(out)[0]
        began = first["time"] - first["step_seconds"]
        for moment in moments:
            time.sleep(max(0.0, began + moment - time.time()))
            failures.append(kill_one(out, choice) - began)
        time.sleep(max(0.0, began + seconds - time.time()))
        run.wait(lambda: any(when > began + seconds for _, when in run.rows()))
        ledger = ended(run, out)
    finally:
        run.close()
    lasted = sum(taken for part, taken in ledger.items() if part != "idle")
    return Endured(seconds=lasted, failures=tuple(failures), ledger=ledger, steps=rows(out)[-1]["step"])


def main(arguments: list[str] | None = None) -> None:
    """Measure, compare and print; exit code 1 where they do not agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0, help="of each run that fails")
    parser.add_argument("--mtbf", type=float, default=12.0, help="mean seconds between kills")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--calm", type=float, default=12.0, help="seconds undisturbed")
    parser.add_argument("--kills", type=int, default=2, help="of each run apart")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    every = options.every
    result: dict[str, Any] = {
        "ranks": RANKS, "mtbf_s": options.mtbf, "every": every, "seed": options.seed, "runs": {}
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number, (name, memory) in enumerate(_MEMORY.items()):
            calm, kills = options.calm, options.kills
            before = apart(folder, f"before-{name}", calm, kills, every, memory=memory)
            moments = failure_moments(options.mtbf, options.seconds, options.seed + number)
            endured = accelerated(folder, moments, options.seconds, every, memory=memory)
            after = apart(folder, f"after-{name}", calm, kills, every, memory=memory)
            terms = mean([before, after])
            found = compared(terms, endured, mtbf=options.mtbf, every=every, memory=memory)
            result["runs"][name] = {**found, "terms_before_and_after": [asdict(before), asdict(after)]}
    result["passed"] = all(agrees(found) for found in result["runs"].values())
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{RANKS} ranks, a rank killed every {options.mtbf:g} s in the mean, saved every {every} steps")
        for name, found in result["runs"].items():
            print("\n".join(table(f"from {name}", found)))
        print(f"within {100 * BOUND:g} points, goodput and every share: {result['passed']}")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
