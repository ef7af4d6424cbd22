"""Runs of the comparison over a slow link: one strategy on two hosts, and how quick its steps are over their link."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.hosts import ROOT, TwoHosts

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
    same_update_as: str | None = None
    """Another strategy that computes the same numbers: its losses are this one's."""

    def settings(self, steps: int, **others: int) -> list[str]:
        """Of the command line; a callable value is one of the number of steps; ``others`` replace."""
        values = {key: self._value(key, steps) for key in self.sync} | others
        return [f"sync.{key}={value}" for key, value in values.items()]

    def whole_steps(self, steps: int) -> int:
        """Its first steps, in which gradients travel whole."""
        return int(self._value("compression_warmup_steps", steps) or 0)

    def cycle(self, steps: int) -> int:
        """Steps after which its traffic repeats."""
        return int(self._value("period", steps) or 1)

    def _value(self, key: str, steps: int) -> Any:
        value = self.sync.get(key)
        return value(steps) if callable(value) else value


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

    step_seconds: list[float]
    """Of each step, without validation."""
    validation: list[tuple[int, float]]
    """(step, loss)."""
    losses: list[float]
    link_bytes: int
    """That the kernel counted on both ends, from start to end."""
    ledger_bytes: float | None
    """What the ledger's recorded step says crosses; None where that is not what the kernel counts in every step."""

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


@dataclass(frozen=True)
class Pace:
    """What a step costs over the link, once traffic is what it stays."""

    seconds: float
    link_bytes: float
    ledger_bytes: float | None


def train(
    hosts: TwoHosts,
    folder: Path,
    strategy: Strategy,
    scale: Scale,
    steps: int,
    seed: int,
    *,
    every: int,
    whole: int | None = None,
) -> Run:
    """One run of a strategy on both hosts, over the link as it is now.

    Args:
        hosts: on which.
        folder: for the run's directory.
        strategy: what is compared.
        scale: of the comparison; schedules are made for its steps.
        steps: of this run.
        seed: of weights and samples.
        every: steps between validations.
        whole: first steps in which gradients travel whole; absent: the strategy's.
    """
    settings = {
        "train.steps": steps,
        "train.eval_every": every,
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
    out = folder / f"run-{len(list(folder.iterdir()))}"
    arguments = ["train", str(job), "--out", str(out), "--layout", f"dp={RANKS}"]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    others = {} if whole is None else {"compression_warmup_steps": whole}
    for setting in strategy.settings(scale.steps, **others):
        arguments += ["--set", setting]
    before = [hosts.counters(host).sent for host in range(2)]
    hosts.run_both(hosts.torchrun(PER_HOST, "meshwright.cli.main", arguments), timeout=7200)
    sent = sum(hosts.counters(host).sent - count for host, count in enumerate(before))
    return read(out, strategy, sent)


def pace(hosts: TwoHosts, folder: Path, strategy: Strategy, scale: Scale, least: int) -> Pace:
    """Time ``least`` steps or more, in whole cycles, and count their bytes: those of a longer run less a shorter one's.

    The shorter one holds what is not alike: the first steps, two that travel whole, the recording of the ledger.
    """
    cycle = strategy.cycle(scale.steps)
    whole = min(2, strategy.whole_steps(scale.steps)) or None
    few = (whole or 0) + cycle * -(-4 // cycle)
    more = few + cycle * -(-least // cycle)
    shorter = train(hosts, folder, strategy, scale, few, 1, every=few, whole=whole)
    longer = train(hosts, folder, strategy, scale, more, 1, every=more, whole=whole)
    timed = longer.step_seconds[few:]
    seconds = statistics.mean(timed) if cycle > 1 else statistics.median(timed)
    return Pace(seconds, (longer.link_bytes - shorter.link_bytes) / (more - few), longer.ledger_bytes)


def read(out: Path, strategy: Strategy, sent: int) -> Run:
    """What a run directory says."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [record for record in records if "step_seconds" in record]
    ledger = json.loads((out / "ledger.json").read_text(encoding="utf-8")) if (out / "ledger.json").exists() else None
    return Run(
        step_seconds=[record["step_seconds"] for record in trained],
        validation=[(record["step"], record["validation_loss"]) for record in records if "validation_loss" in record],
        losses=[record["loss"] for record in trained],
        link_bytes=sent,
        ledger_bytes=crossing(ledger, strategy) if ledger is not None else None,
    )


def crossing(ledger: Mapping[str, Any], strategy: Strategy) -> float | None:
    """Bytes that cross the link in a step by the ledger of one, where all steps are alike."""
    if not strategy.symmetric or strategy.sync.get("strategy") or strategy.sync.get("compression") == "zero-one-adam":
        return None
    wire = sum(entry["wire"] for rank in ledger["ranks"] for entry in rank["sends"])
    return float(wire * PER_HOST / (RANKS - 1))
