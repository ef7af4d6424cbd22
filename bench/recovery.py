"""From kill -9 of a rank to the next finished step: `python -m bench.recovery [--rounds N] [--json]`.

Four ranks, about ten million parameters, data parallel, a checkpoint every ten steps. In each round, in turn: ours with
the warm spare, ours without, and a plain DDP loop with torch.distributed.checkpoint under `torchrun --max-restarts`.
*next*: until any step was finished again; *new*: until one was that had not been before the kill. Then SIGSTOP: is the
rank named within its bound, and is it left alone when SIGCONT comes before?
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from bench.statistics import median
from bench.workload import Workload

RANKS = 4
_EVERY = 10
_KILL_AFTER = 13
_STEPS = 10**6
_BOUND = 2.0
"""Seconds of ``stopped_after``."""
_IN_FLIGHT = 0.05
"""Seconds after the kill in which a step may still end."""
_LIMIT = 150.0
"""Seconds that anything here may take."""
_MODEL = {"vocabulary": 8192, "hidden": 256, "layers": 8, "heads": 4, "ffn_hidden": 640, "sequence": 128, "batch": 8}


def job_file(folder: Path) -> Path:
    """The job of the bench, and its corpus."""
    (folder / "corpus.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(20000)), encoding="ascii")
    path = folder / "job.toml"
    path.write_text(
        f"""
[model]
vocabulary = {_MODEL["vocabulary"]}
hidden = {_MODEL["hidden"]}
layers = {_MODEL["layers"]}
heads = {_MODEL["heads"]}
ffn_hidden = {_MODEL["ffn_hidden"]}

[data]
train = "corpus.txt"
sequence_length = {_MODEL["sequence"]}

[batch]
global_size = {_MODEL["batch"]}

[train]
steps = {_STEPS}

[layout]
dp = {RANKS}

[cluster]
device = "cpu"

[checkpoint]
every = {_EVERY}

[recovery]
stopped_after = {_BOUND}

[observe]
one_device_steps = 0
""",
        encoding="ascii",
    )
    return path


class Run:
    """A training run in its own processes, and what it says of its steps."""

    def __init__(
        self, command: list[str], steps: Path, pid_of: Callable[[int], int], more: Mapping[str, str] | None = None
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(more or {})}
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        self._steps, self._pid_of = steps, pid_of

    def rows(self) -> list[tuple[int, float]]:
        """The finished steps, and when each was written down (seconds since the epoch)."""
        try:
            text = self._steps.read_text(encoding="utf-8")
        except OSError:
            return []
        rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [(row["step"], row["time"]) for row in rows if "validation_loss" not in row]

    def step(self) -> int:
        """The last finished one."""
        rows = self.rows()
        return rows[-1][0] if rows else 0

    def wait(self, ready: Callable[[], bool]) -> float:
        """Until then; seconds it took.

        Raises:
            RuntimeError: it took too long, or the run ended.
        """
        began = time.perf_counter()
        while not ready():
            if time.perf_counter() - began > _LIMIT or self.process.poll() is not None:
                raise RuntimeError(f"the run did not get there (exit code {self.process.poll()})")
            time.sleep(0.005)
        return time.perf_counter() - began

    def signal(self, rank: int, number: int) -> None:
        """To one rank."""
        os.kill(self._pid_of(rank), number)

    def close(self) -> None:
        """End it, and every process that it started."""
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for one in family:  # torchrun's ranks outlive it
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def ours(folder: Path, name: str, *pairs: str) -> Run:
    """``meshwright train``."""
    out = folder / name
    words = [word for pair in pairs for word in ("--set", pair)]
    command = [sys.executable, "-m", "meshwright.cli.main", "train", str(job_file(folder)), "--out", str(out), *words]

    def pid_of(rank: int) -> int:
        attempts = sorted((out / "logs").glob("attempt-*"), key=lambda path: int(path.name.removeprefix("attempt-")))
        return int(json.loads((attempts[-1] / f"rank-{rank}.json").read_text(encoding="utf-8"))["pid"])

    return Run(command, out / "metrics.jsonl", pid_of)


def theirs(folder: Path, name: str) -> Run:
    """``torchrun --max-restarts``."""
    out = folder / name
    out.mkdir()
    program = ["bench.recovery_peer", str(out), str(_STEPS), str(_EVERY), json.dumps(_MODEL)]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
        "--max-restarts", "3", "-m", *program,
    ]  # fmt: skip
    return Run(
        command, out / "steps.jsonl", lambda rank: int((out / f"rank-{rank}.pid").read_text(encoding="ascii")),
        # Without it ranks of the next attempt meet addresses of dead ones in the agent's store.
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip


def killed(run: Run) -> dict[str, float] | None:
    """Kill a rank some steps after a checkpoint, and measure until the run is on its way again; None: it never was."""
    try:
        run.wait(lambda: run.step() >= _KILL_AFTER)
        at = time.time()
        run.signal(1, signal.SIGKILL)
        time.sleep(_IN_FLIGHT)  # a step that was under way may still be written down
        best = run.step()

        def later() -> list[tuple[int, float]]:
            return [row for row in run.rows() if row[1] > at + _IN_FLIGHT]

        run.wait(lambda: bool(later()))
        following = later()[0]
        run.wait(lambda: run.step() > best)
        new = next(when for step, when in later() if step > best)
        return {"next_s": following[1] - at, "new_s": new - at, "lost_steps": float(best - following[0] + 1)}
    except RuntimeError:
        return None
    finally:
        run.close()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The launcher's events of one kind."""
    try:
        lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        return []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["event"] == kind]


def stopped(folder: Path) -> dict[str, Any]:
    """SIGSTOP with SIGCONT before the bound, then SIGSTOP for good."""
    out = folder / "stopped"
    run = ours(folder, out.name)
    try:
        run.wait(lambda: run.step() >= 3)
        first = run._pid_of(2)
        run.signal(2, signal.SIGSTOP)
        time.sleep(_BOUND / 2)
        run.signal(2, signal.SIGCONT)
        step = run.step()
        run.wait(lambda: run.step() > step + 2)
        spared = run._pid_of(2) == first and not events(out, "incident")
        run.signal(2, signal.SIGSTOP)
        took = run.wait(lambda: bool(events(out, "incident")))
        incident = events(out, "incident")[0]
        return {
            "bound_s": _BOUND, "named_s": took, "named": incident["ranks"] == [2] and incident["kind"] == "stopped",
            "sentence": incident["sentence"], "continued_is_spared": spared,
        }  # fmt: skip
    finally:
        run.close()


def _medians(rounds: list[dict[str, float]]) -> dict[str, float] | None:
    return {key: median([one[key] for one in rounds]) for key in rounds[0]} if rounds else None


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found: dict[str, list[dict[str, float] | None]] = {"warm": [], "cold": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(options.rounds):
            found["warm"].append(killed(ours(folder, f"warm-{number}")))
            found["cold"].append(killed(ours(folder, f"cold-{number}", "recovery.start=cold")))
            found["torchrun"].append(killed(theirs(folder, f"torchrun-{number}")))
        halt = stopped(folder)
    parameters = Workload(**_MODEL).spec.parameter_count  # type: ignore[arg-type]
    medians = {kind: _medians([one for one in all_ if one is not None]) for kind, all_ in found.items()}
    result = {
        "ranks": RANKS, "parameters": parameters, "rounds": options.rounds, "median": medians, "rounds_s": found,
        "stopped": halt,
    }  # fmt: skip
    if options.json:
        print(json.dumps(result))
        return
    print(f"{RANKS} ranks, {parameters:,} parameters, saved every {_EVERY} steps; medians of {options.rounds} rounds")
    print(f"{'':42}{'next step':>12}{'new step':>12}{'steps lost':>12}")
    names = {"warm": "meshwright, warm spare", "cold": "meshwright, cold", "torchrun": "torchrun --max-restarts, DCP"}
    for kind, name in names.items():
        one = medians[kind]
        if one is None:
            print(f"{name:42}  not one of {options.rounds} went on within {_LIMIT:g} s")
            continue
        print(f"{name:42}{one['next_s']:10.2f} s{one['new_s']:10.2f} s{one['lost_steps']:12.0f}")
    print(f"SIGSTOP: bound {halt['bound_s']} s, named after {halt['named_s']:.2f} s, the right rank: {halt['named']}; "
          f"with SIGCONT before it left alone: {halt['continued_is_spared']}")  # fmt: skip


if __name__ == "__main__":
    main()
