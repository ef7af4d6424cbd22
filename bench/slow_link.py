"""Time to one loss over a slow link, strategy by strategy: `python -m bench.slow_link [--json]` (root, Linux).

Two hosts (network namespaces) of two ranks each, joined by a link of 100 Mbit/s each way, train the quick-start model.
The target is the validation loss that plain all-reduce has after ``--steps`` steps; every strategy runs until it has
been below it, at most ``--most`` times as many. What is compared:

    T1      seconds of plain all-reduce's steps                 T0    the same steps without any exchange of gradients
    time    of a strategy's steps until its target              closed = (T1 - time) / (T1 - T0)
    link    bytes that the kernel counted on both ends; against what the run's own ledger says crosses, step by step

Validation and starting are not in the times. Nothing is clipped, the rate is constant after its warm-up, and all
strategies see the same samples. The whole comparison is 300 steps of 2,048 tokens with three seeds (hours on a small
machine); ``--steps 20 --tokens 256 --seeds 1`` takes minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.hosts import ROOT, TwoHosts, two_hosts, why_not

RANKS, PER_HOST = 4, 2
EVALUATIONS = 20
"""In as many steps as plain all-reduce takes."""


@dataclass(frozen=True)
class Strategy:
    """A [sync] section, as a function of the number of steps."""

    name: str
    sync: Mapping[str, Any]
    symmetric: bool = True
    """Every rank sends every other the same, so that 2/3 of the wire bytes cross between the hosts."""

    def settings(self, steps: int) -> list[str]:
        """Of the command line; a callable value is one of the number of steps."""
        values = {key: value(steps) if callable(value) else value for key, value in self.sync.items()}
        return [f"sync.{key}={value}" for key, value in values.items()]


def _tenth(steps: int) -> int:
    return max(4, steps // 10)


def _fifth(steps: int) -> int:
    return max(4, steps // 5)


PLAIN = Strategy("all-reduce", {})
ALONE = Strategy("no exchange", {"strategy": "local", "period": 1_000_000})
STRATEGIES = (
    Strategy("hierarchical", {"algorithm": "hierarchical", "node_size": PER_HOST}, symmetric=False),
    Strategy("bf16", {"compression": "bf16"}),
    Strategy("int8", {"compression": "int8"}),
    Strategy("fp8", {"compression": "fp8"}),
    Strategy("sign", {"compression": "sign"}),
    Strategy("qsgd", {"compression": "qsgd"}),
    Strategy("powersgd", {"compression": "powersgd", "compression_rank": 4}),
    Strategy("dgc", {"compression": "dgc", "compression_warmup_steps": _tenth}),
    Strategy("one-bit-adam", {"compression": "one-bit-adam", "compression_warmup_steps": _fifth}),
    Strategy("zero-one-adam", {"compression": "zero-one-adam"}),
    Strategy("local", {"strategy": "local", "period": 4}),
    Strategy("easgd", {"strategy": "easgd", "period": 4}),
    Strategy("diloco", {"strategy": "diloco", "period": _tenth}),
    Strategy("diloco-int8", {"strategy": "diloco", "period": _tenth, "compression": "int8"}),
)


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    steps: int
    tokens: int
    most: float
    rate: str
    lr: float

    @property
    def sequence(self) -> int:
        """Tokens of a sequence: at least one sequence a rank."""
        return min(256, self.tokens // RANKS)


@dataclass
class Run:
    """One run: its losses and seconds by step, and what crossed the link."""

    seconds: list[float]
    """Of the steps up to each, without validation."""
    validation: list[tuple[int, float]]
    """(step, loss)."""
    losses: list[float]
    link_bytes: int
    ledger_bytes: float | None
    """What the ledger's recorded step says crosses, times the steps; None where steps are not alike."""

    def steps_to(self, target: float) -> float | None:
        """Steps until the validation loss is at the target, between two validations by a straight line."""
        before: tuple[int, float] | None = None
        for step, loss in self.validation:
            if loss <= target:
                if before is None or before[1] == loss:
                    return float(step)
                return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
            before = step, loss
        return None

    def seconds_to(self, target: float) -> float | None:
        """Seconds of those steps."""
        steps = self.steps_to(target)
        if steps is None:
            return None
        whole = int(steps)
        done = self.seconds[whole - 1] if whole else 0.0
        following = self.seconds[min(whole, len(self.seconds) - 1)]
        return done + (steps - whole) * (following - done)


def train(hosts: TwoHosts, folder: Path, strategy: Strategy, scale: Scale, steps: int, seed: int) -> Run:
    """One run of a strategy on both hosts."""
    settings = {
        "train.steps": steps,
        "train.eval_every": max(1, scale.steps // EVALUATIONS),
        "train.seed": seed,
        "data.validation": 0.002,
        "data.sequence_length": scale.sequence,
        "batch.global_size": scale.tokens // scale.sequence,
        "optimizer.lr": scale.lr,
        "optimizer.schedule": "constant",
        "optimizer.min_lr_ratio": 0,
        "optimizer.warmup_steps": max(1, scale.steps // 15),
        "checkpoint.every": steps,
        "observe.one_device_steps": 0,
        "observe.sample_tokens": 1,
    }
    job = folder / "job.toml"
    source = (ROOT / "examples" / "quickstart.toml").read_text(encoding="utf-8")
    job.write_text(
        "".join(line for line in source.splitlines(True) if not line.startswith("clip_norm")).replace(
            '"data/', f'"{ROOT / "examples" / "data"}/'
        ),
        encoding="utf-8",
    )
    out = folder / f"{strategy.name}-{steps}-{seed}"
    arguments = ["train", str(job), "--out", str(out), "--layout", f"dp={RANKS}"]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    for setting in strategy.settings(scale.steps):
        arguments += ["--set", setting]
    before = [hosts.counters(host).sent for host in range(2)]
    hosts.run_both(hosts.torchrun(PER_HOST, "meshwright.cli.main", arguments), timeout=7200)
    sent = sum(hosts.counters(host).sent - count for host, count in enumerate(before))
    return read(out, strategy, steps, sent)


def read(out: Path, strategy: Strategy, steps: int, sent: int) -> Run:
    """What a run directory says."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [record for record in records if "step_seconds" in record]
    # The two steps that the ledger was recorded in ran slower for it.
    usual = statistics.median(record["step_seconds"] for record in trained)
    ledger = json.loads((out / "ledger.json").read_text(encoding="utf-8")) if (out / "ledger.json").exists() else None
    seconds, total = [], 0.0
    for record in trained:
        total += min(record["step_seconds"], 3 * usual)
        seconds.append(total)
    return Run(
        seconds=seconds,
        validation=[(record["step"], record["validation_loss"]) for record in records if "validation_loss" in record],
        losses=[record["loss"] for record in trained],
        link_bytes=sent,
        ledger_bytes=crossing(ledger, strategy, steps) if ledger is not None else None,
    )


def crossing(ledger: Mapping[str, Any], strategy: Strategy, steps: int) -> float | None:
    """Bytes that cross the link in all steps by the ledger of one, where all steps are alike."""
    uneven = strategy.sync.get("strategy") or strategy.sync.get("compression_warmup_steps")
    if not strategy.symmetric or uneven or strategy.sync.get("compression") == "zero-one-adam":
        return None
    wire = sum(entry["wire"] for rank in ledger["ranks"] for entry in rank["sends"])
    return float(steps * wire * PER_HOST / (RANKS - 1))


def measure(strategies: Sequence[Strategy], scale: Scale, seeds: Sequence[int]) -> dict[str, Any]:
    """All runs, interleaved by seed."""
    rows: dict[str, list[dict[str, Any]]] = {strategy.name: [] for strategy in (PLAIN, ALONE, *strategies)}
    targets = []
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name, two_hosts(rate=scale.rate) as hosts:
        folder = Path(name)
        for seed in seeds:
            plain = train(hosts, folder, PLAIN, scale, scale.steps, seed)
            target = plain.validation[-1][1]
            targets.append(target)
            alone = train(hosts, folder, ALONE, scale, min(scale.steps, 12), seed)
            compute = scale.steps * statistics.median(
                b - a for a, b in zip([0.0, *alone.seconds], alone.seconds, strict=False)
            )
            rows[PLAIN.name].append(row(plain, target, plain.seconds[-1], compute))
            print(f"{PLAIN.name}: {summary(rows[PLAIN.name][-1])}", file=sys.stderr, flush=True)
            rows[ALONE.name].append({"seconds": compute, "step_seconds": compute / scale.steps})
            for strategy in strategies:
                try:
                    run = train(hosts, folder, strategy, scale, round(scale.most * scale.steps), seed)
                    rows[strategy.name].append(row(run, target, plain.seconds[-1], compute))
                except AssertionError as error:  # it failed; the others are still worth comparing
                    rows[strategy.name].append({"failed": str(error)[-2000:]})
                print(f"{strategy.name}: {summary(rows[strategy.name][-1])}", file=sys.stderr, flush=True)
    return {
        "rate": scale.rate,
        "steps": scale.steps,
        "tokens_per_step": scale.tokens,
        "seeds": list(seeds),
        "targets": targets,
        "strategies": rows,
    }


def summary(figures: Mapping[str, Any]) -> str:
    """One row on one line."""
    return ", ".join(f"{key} {value}" for key, value in figures.items() if key not in ("validation", "losses"))


def row(run: Run, target: float, plain_seconds: float, compute_seconds: float) -> dict[str, Any]:
    """One run in figures."""
    seconds, steps = run.seconds_to(target), run.steps_to(target)
    gap = plain_seconds - compute_seconds
    link = run.link_bytes / len(run.seconds)
    return {
        "seconds": seconds,
        "steps": steps,
        "step_seconds": run.seconds[-1] / len(run.seconds),
        "closed": None if seconds is None or gap <= 0 else (plain_seconds - seconds) / gap,
        "times_faster": None if not seconds else plain_seconds / seconds,
        "link_bytes_per_step": link,
        "link_over_ledger": None if not run.ledger_bytes else run.link_bytes / run.ledger_bytes,
        "validation": run.validation,
        "losses": run.losses,
    }


def table(found: Mapping[str, Any]) -> str:
    """The result for people, medians over seeds."""
    lines = [
        f"{'strategy':<14} {'seconds':>9} {'steps':>7} {'closed':>7} {'faster':>7} {'MB a step':>10} {'/ledger':>8}"
    ]
    for name, runs in found["strategies"].items():
        cells = [f"{name:<14}"]
        for key, form, scale in (
            ("seconds", "9.1f", 1.0), ("steps", "7.1f", 1.0), ("closed", "7.2f", 1.0), ("times_faster", "7.2f", 1.0),
            ("link_bytes_per_step", "10.3f", 1e-6), ("link_over_ledger", "8.3f", 1.0),
        ):  # fmt: skip
            values = [run[key] for run in runs if run.get(key) is not None]
            width = int(form.split(".")[0])
            shown = format(scale * statistics.median(values), form) if len(values) == len(runs) else "-".rjust(width)
            cells.append(shown)
        lines.append(" ".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Time to one loss over a slow link, strategy by strategy.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=2048, help="a step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=float, default=1.5, help="steps of a strategy, in those of plain all-reduce")
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc says it")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--strategies", help="names, with commas; absent: all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        parser.exit(2, f"slow_link: {reason}\n")
    if options.tokens % (16 * RANKS) or options.steps < 4:
        parser.exit(2, f"slow_link: --tokens must be a multiple of {16 * RANKS}, and --steps at least 4\n")
    names = {strategy.name: strategy for strategy in STRATEGIES}
    chosen = options.strategies.split(",") if options.strategies else list(names)
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.exit(2, f"slow_link: --strategies: {', '.join(unknown)} unknown; use some of {', '.join(names)}\n")
    scale = Scale(options.steps, options.tokens, options.most, options.rate, options.lr)
    found = measure([names[name] for name in chosen], scale, range(1, options.seeds + 1))
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
