"""Runs of the comparison over a slow link: one strategy on two hosts, and how quick its steps are over their link."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.job.adam_rounds import full_round
from meshwright.job.job import run_job
from meshwright.plan.predict import predict
from tests.cluster.hosts import ROOT, TwoHosts

RANKS, PER_HOST = 4, 2
EVALUATIONS = 20
"""In as many steps as plain all-reduce takes."""
VALIDATION = 0.01
"""The part of the text on which they are made."""
_LONGEST = 7200.0
"""Seconds of one run over the link."""


def validation_every(steps: int) -> int:
    """Steps between two validations, where plain all-reduce takes ``steps``."""
    return max(1, steps // EVALUATIONS)


@dataclass(frozen=True)
class Strategy:
    """A [sync] section, as a function of the number of steps."""

    name: str
    sync: Mapping[str, Any]
    layout: str = f"dp={RANKS}"
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Keys of [optimizer] that are not those of the comparison."""
    against: str = "all-reduce"
    """Whose loss is the target."""
    crossing: float = PER_HOST / (RANKS - 1)
    """What part of the wire bytes of dp crosses between the hosts; by default each rank sends all others the same."""
    same_update_as: str | None = None
    """Another strategy that computes the same numbers: its losses are this one's."""
    paced_as: str | None = None
    """Another strategy whose steps, those apart in which gradients travel whole, cost the same."""
    ramp: bool = False
    """The steps of its warm-up cost less than whole gradients: they are measured as they are."""
    over_link: bool = False
    """Its losses depend on the link, because who is quick trains on more samples: it runs over it throughout."""

    def settings(self, steps: int, **others: int) -> list[str]:
        """Of the command line; a callable value is one of the number of steps; ``others`` replace."""
        values = {key: self._value(key, steps) for key in self.sync} | others
        return [f"sync.{key}={value}" for key, value in values.items()]

    def warmup(self, steps: int) -> int:
        """Steps of its warm-up."""
        return int(self._value("compression_warmup_steps", steps) or 0)

    def whole_rounds(self, steps: int, taken: float) -> float:
        """In how many of the first ``taken`` steps gradients travel whole."""
        kind = self.sync.get("compression")
        if kind not in ("one-bit-adam", "zero-one-adam"):
            return 0.0 if self.ramp else min(self.warmup(steps), taken)
        return sum(full_round(kind, step, self.warmup(steps)) for step in range(round(taken)))

    def cycle(self, steps: int) -> int:
        """Steps after which its traffic repeats."""
        period = int(self._value("period", steps) or 1)
        return period if period <= steps else 1

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

    @property
    def last(self) -> float:
        """The last validation loss."""
        return self.validation[-1][1]

    def pace(self) -> Pace:
        """Its steps in the mean; bytes with those of starting and validating."""
        return Pace(statistics.mean(self.step_seconds), self.link_bytes / len(self.step_seconds), self.ledger_bytes)

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
    """What a step costs over the link, once traffic is what it stays, and what the first ones cost before."""

    seconds: float
    link_bytes: float
    ledger_bytes: float | None
    first: int = 0
    first_seconds: float = 0.0
    first_bytes: float = 0.0


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
    before = [hosts.counters(host).sent for host in range(2)]
    out = _write(folder)
    arguments = _arguments(folder, out, strategy, scale, steps, seed, every=every, whole=whole)
    if strategy.sync.get("strategy") == "server":
        _with_servers(hosts, arguments, out)
    else:
        hosts.run_both(hosts.torchrun(PER_HOST, "meshwright.cli.main", arguments), timeout=_LONGEST)
    sent = sum(hosts.counters(host).sent - count for host, count in enumerate(before))
    return read(out, sent, crossing(out, strategy))


def _with_servers(hosts: TwoHosts, arguments: Sequence[str], out: Path) -> None:
    """Servers and half of the workers on host 0, the other half on host 1."""
    away = [f"sync.server_host={hosts.hosts[0].address}", f"sync.workers_elsewhere={PER_HOST}"]
    words = [sys.executable, "-m", "meshwright.cli.main", *arguments]
    processes = [hosts.start(0, [*words, *(word for pair in away for word in ("--set", pair))])]
    while not (out / "servers.json").exists():
        if processes[0].poll() is not None:
            raise AssertionError(processes[0].communicate()[0])
        time.sleep(0.05)
    module = [sys.executable, "-m", "meshwright.train.servers.process", str(out), "--worker"]
    processes += [hosts.start(1, [*module, str(worker)]) for worker in range(RANKS - PER_HOST, RANKS)]
    for process in processes:
        output = process.communicate(timeout=_LONGEST)[0]
        if process.returncode:
            raise AssertionError(output)


def losses(folder: Path, strategy: Strategy, scale: Scale, steps: int, seed: int, target: float | None) -> Run:
    """One run on this machine alone, whose losses are those over any link; it ends once the loss is at ``target``."""
    out = _write(folder)
    arguments = _arguments(folder, out, strategy, scale, steps, seed, every=validation_every(scale.steps))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "meshwright.cli.main", *arguments]
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    there = False
    while process.poll() is None:
        time.sleep(0.5)
        if target is not None and not there and (out / "metrics.jsonl").exists():
            there = any(loss <= target for _, loss in read(out).validation)
            if there:
                process.send_signal(signal.SIGTERM)
    output = process.communicate()[0]
    if process.returncode and not there:
        raise AssertionError(output)
    return read(out)


def _write(folder: Path) -> Path:
    """The quick-start job without clipping, in ``folder``; a run directory of its own."""
    source = (ROOT / "examples" / "quickstart.toml").read_text(encoding="utf-8")
    (folder / "job.toml").write_text(
        "".join(line for line in source.splitlines(True) if not line.startswith("clip_norm")).replace(
            '"data/', f'"{ROOT / "examples" / "data"}/'
        ),
        encoding="utf-8",
    )
    return folder / f"run-{len(list(folder.iterdir()))}"


def _arguments(
    folder: Path, out: Path, strategy: Strategy, scale: Scale, steps: int, seed: int, *, every: int,
    whole: int | None = None,
) -> list[str]:  # fmt: skip
    """Of ``meshwright``."""
    settings = {
        "train.steps": steps,
        "train.eval_every": every,
        "train.seed": seed,
        "data.validation": VALIDATION,
        "data.sequence_length": scale.sequence,
        "batch.global_size": scale.tokens // scale.sequence,
        "optimizer.lr": scale.lr,
        "optimizer.schedule": "constant",
        "optimizer.min_lr_ratio": 0,
        "optimizer.warmup_steps": max(1, scale.steps // 15),
        "checkpoint.every": steps,
        "observe.one_device_steps": 0,
        "observe.sample_tokens": 1,
        **{f"optimizer.{key}": value for key, value in strategy.optimizer.items()},
    }
    arguments = ["train", str(folder / "job.toml"), "--out", str(out), "--layout", strategy.layout]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    others = {} if whole is None else {"compression_warmup_steps": whole}
    if "period" in strategy.sync:
        others["period"] = min(strategy.sync["period"], steps)  # a shorter run meets at its end
    for setting in strategy.settings(scale.steps, **others):
        arguments += ["--set", setting]
    return arguments


def pace(hosts: TwoHosts, folder: Path, strategy: Strategy, scale: Scale, least: int) -> Pace:
    """Time ``least`` steps or more, in whole cycles, and count their bytes: those of a longer run less a shorter one's.

    The shorter one holds what is not alike: the first steps, of a warm-up two (a ramp: all), the ledger's recording.
    """
    cycle, warmup = strategy.cycle(scale.steps), strategy.warmup(scale.steps)
    first = warmup if strategy.ramp else min(2, warmup)
    few = first + cycle * -(-4 // cycle)
    more = few + cycle * -(-least // cycle)
    shorter = train(hosts, folder, strategy, scale, few, 1, every=few, whole=first or None)
    longer = train(hosts, folder, strategy, scale, more, 1, every=more, whole=first or None)
    timed = longer.step_seconds[few:]
    seconds = statistics.mean(timed) if cycle > 1 else statistics.median(timed)
    sent = (longer.link_bytes - shorter.link_bytes) / (more - few)
    if not strategy.ramp:
        return Pace(seconds, sent, longer.ledger_bytes)
    # What starting sends is counted with the ramp.
    ramp_bytes = shorter.link_bytes - sent * (few - first)
    return Pace(seconds, sent, longer.ledger_bytes, first, sum(longer.step_seconds[:first]), ramp_bytes)


def read(out: Path, sent: int = 0, ledger_bytes: float | None = None) -> Run:
    """What a run directory says, of a run that may be going still."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    trained = [record for record in records if "step_seconds" in record]
    return Run(
        step_seconds=[record["step_seconds"] for record in trained],
        validation=[(record["step"], record["validation_loss"]) for record in records if "validation_loss" in record],
        losses=[record["loss"] for record in trained],
        link_bytes=sent,
        ledger_bytes=ledger_bytes,
    )


def crossing(out: Path, strategy: Strategy) -> float | None:
    """Bytes that cross the link in a step by the run's own ledger; None where that is not what every step sends.

    Of replicas that train apart, in the mean over a period of the predicted ledger, which has a step with a meeting.
    """
    if strategy.sync.get("strategy") == "server":
        summary = out / "summary.json"
        if strategy.over_link or not summary.exists():
            return None
        worker = json.loads(summary.read_text(encoding="utf-8"))["servers"]["predicted"]["worker"]
        return float(PER_HOST * (worker["push"] + worker["pull"]))
    if strategy.sync.get("strategy"):
        job = run_job(out).resolve()
        period, sends = job.sync.period, [send for rank in predict(job).ranks for send in rank.sends]
        return sum(
            _crosses(send.axis, strategy) * send.wire / (period if send.phase == "publish" else 1) for send in sends
        )
    path = out / "ledger.json"
    if not path.exists() or strategy.sync.get("compression") == "zero-one-adam":
        return None
    ledger = json.loads(path.read_text(encoding="utf-8"))
    entries = [entry for rank in ledger["ranks"] for entry in rank["sends"]]
    return float(sum(_crosses(entry["axis"], strategy) * entry["wire"] for entry in entries))


def _crosses(axis: str, strategy: Strategy) -> float:
    """What part of the wire bytes of an axis crosses the link."""
    return {"shard": 0.0, "replicate": 1.0}.get(axis, strategy.crossing)
