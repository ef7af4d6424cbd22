"""Parameter server: throughput and staleness by workers and mode: `python -m bench.servers [--json]`.

The quickstart model on this machine, each run in processes of its own: all-reduce with P ranks, and a parameter
server with P workers in every mode; rounds interleaved. `lost` starts a synchronous and an asynchronous run and kills
a worker, then the primary: how long no step was finished after each.

Throughput is valid tokens a second over the steady steps of the run, all of one run's steps divided by their time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.statistics import median

ROOT = Path(__file__).parents[1]
SERVER = ("sync.strategy=server", "sync.servers=2")
MODES: dict[str, tuple[str, ...]] = {
    "all-reduce": (),
    "synchronous": SERVER,
    "stale-synchronous, bound 2": (*SERVER, "sync.server_mode=stale-synchronous", "sync.staleness_bound=2"),
    "asynchronous": (*SERVER, "sync.server_mode=asynchronous"),
}
_WARM = 3
"""First steps that do not count."""


def _settings(pairs: tuple[str, ...]) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def _command(job: Path, out: Path, workers: int, steps: int, pairs: tuple[str, ...]) -> list[str]:
    fixed = (
        f"train.steps={steps}", "checkpoint.every=1000000", "observe.one_device_steps=0", "batch.global_size=12",
        "data.sequence_length=64", "optimizer.schedule=constant", "optimizer.min_lr_ratio=0",
    )  # fmt: skip
    words = [sys.executable, "-m", "meshwright.cli.main", "train", str(job), "--out", str(out), "--json"]
    return [*words, "--layout", f"dp={workers}", *_settings((*fixed, *pairs))]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def run(job: Path, workers: int, steps: int, mode: str) -> dict[str, Any]:
    """One run's throughput and staleness."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        out = Path(folder) / "run"
        done = subprocess.run(
            _command(job, out, workers, steps, MODES[mode]),
            cwd=ROOT, env=_environment(), capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{mode} with {workers} workers failed:\n{done.stderr}")
        steady = [each for each in _records(out / "metrics.jsonl") if each["step"] > _WARM and "loss" in each]
        summary = json.loads((out / "summary.json").read_text())
    seconds = sum(record["step_seconds"] for record in steady)
    servers = summary.get("servers", {}).get("measured", {}).values()
    busy = [each["busy_seconds"] / each["alive_seconds"] for each in servers if "shard" in each]
    return {
        "tokens_per_second": sum(record["valid_tokens"] for record in steady) / seconds,
        "staleness_mean": summary.get("staleness_mean"),
        "staleness_max": summary.get("staleness_max"),
        "server_busy": max(busy, default=None),
    }


def table(job: Path, most: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds, by workers and mode."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for workers in range(1, most + 1):
            for mode in MODES:
                found.setdefault((workers, mode), []).append(run(job, workers, steps, mode))
    return [
        {
            "workers": workers,
            "mode": mode,
            **{
                key: median([each[key] for each in runs]) if runs[0][key] is not None else None
                for key in ("tokens_per_second", "staleness_mean", "staleness_max", "server_busy")
            },
        }
        for (workers, mode), runs in found.items()
    ]


def _pids(out: Path, role: str) -> list[int]:
    events = _records(out / "events.jsonl")
    return [e["pid"] for e in events if e["event"] == "process-started" and e["process"].startswith(role)]


def lost(job: Path, mode: str, steps: int = 60) -> dict[str, Any]:
    """Kill a worker, then the primary of shard 0, while a run goes on; the longest pause between two steps."""
    pairs = (*MODES[mode], "sync.server_replicas=2", "sync.server_timeout=5")
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        out = Path(folder) / "run"
        with subprocess.Popen(
            _command(job, out, 2, steps, pairs), cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL
        ) as process:
            kills = []
            for at, what in ((15, "worker-0."), (30, "head")):
                _wait_for(out, at, process)
                if what == "head":
                    ready = next(e for e in _records(out / "events.jsonl") if e["event"] == "servers-ready")
                    what = ready["chains"][0][0]
                os.kill(_pids(out, what)[-1], signal.SIGKILL)
                kills.append(time.time())
            process.wait()
        times = [record["time"] for record in _records(out / "metrics.jsonl") if "loss" in record]
    pauses = [
        min(after for after in times if after > kill) - max(before for before in times if before <= kill)
        for kill in kills
    ]
    return {
        "mode": mode, "steps": len(times), "pause_after_worker_seconds": round(pauses[0], 3),
        "pause_after_primary_seconds": round(pauses[1], 3),
    }  # fmt: skip


def _wait_for(out: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    while not (out / "metrics.jsonl").exists() or not any(
        record["step"] >= step for record in _records(out / "metrics.jsonl")
    ):
        if process.poll() is not None:
            raise SystemExit("the run ended before anything was killed")
        time.sleep(0.05)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Throughput and staleness of the parameter server.")
    parser.add_argument("--job", type=Path, default=ROOT / "examples/quickstart.toml")
    parser.add_argument("--workers", type=int, default=4, help="from 1 to so many")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    rows = table(options.job, options.workers, options.steps, options.rounds)
    losses = [lost(options.job, mode) for mode in ("synchronous", "asynchronous")]
    if options.json:
        print(json.dumps({"rows": rows, "lost": losses}))
        return
    print(f"{'workers':>7}  {'mode':<27} {'tokens/s':>9}  staleness mean, max   busiest server")
    for row in rows:
        stale = "" if row["staleness_mean"] is None else f"{row['staleness_mean']:8.2f} {row['staleness_max']:6.0f}"
        busy = "" if row["server_busy"] is None else f"{row['server_busy']:14.0%}"
        print(f"{row['workers']:>7}  {row['mode']:<27} {row['tokens_per_second']:>9,.0f}  {stale:<20}{busy}")
    for each in losses:
        print(
            f"killed in {each['mode']} mode: a worker, and no step for {each['pause_after_worker_seconds']:.2f} s; "
            f"the primary, and no step for {each['pause_after_primary_seconds']:.2f} s"
        )


if __name__ == "__main__":
    main()
