"""One run of the fault campaign: started as a user starts it, watched, resumed where it ended, judged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

from bench.fault_draw import EVERY, STEPS, Entry
from meshwright.checkpoint.compare import compare_checkpoints
from meshwright.checkpoint.folder import latest, step_folder, steps
from meshwright.checkpoint.load import read_tensor
from meshwright.checkpoint.manifest import read_manifest
from meshwright.comm.mesh import Mesh
from meshwright.job.job import load_job
from meshwright.job.layout_text import parse_layout
from meshwright.observe.records import read_json_lines
from meshwright.prove.pool import RankPool
from meshwright.train.faults.fired import Fired, named
from meshwright.train.loop import TrainingLoop

ROOT = Path(__file__).parents[1]
MARK = "MESHWRIGHT_BENCH_FAULTS"
"""Environment variable by which every process of a run is found again, whatever its session or group."""
BOUND = 120.0
"""Seconds in which a run must have ended or finished: a hang lasts longer. Generous, for busy machines."""
ORPHAN_SECONDS = 10.0
"""After the end of the command, in which its last process must be gone."""
_RATE = 1e-3
TOLERANCE = 1e-10
"""Of parameters in float64 after a change of layout (relative to the largest, or to lr x steps)."""

JOB = f"""
[model]
vocabulary = 257
hidden = 32
layers = 4
heads = 4
kv_heads = 2
ffn_hidden = 48

[data]
train = "corpus.txt"
sequence_length = 16

[batch]
global_size = 8

[optimizer]
lr = {_RATE}
eps = 1e-6

[train]
steps = {STEPS}
seed = 3

[precision]
dtype = "float64"

[layout]
micro_batch = 1

[checkpoint]
every = {EVERY}
keep = 3
damaged = "previous"

[cluster]
device = "cpu"

[observe]
one_device_steps = 0
"""


@dataclass
class Verdict:
    """What became of one entry."""

    number: int
    faults: list[str]
    kind: str
    rank: int
    step: int
    phase: str
    layout: str
    fired: bool = False
    outcome: str = ""
    """``undisturbed``, ``recovered`` (in place), ``resumed`` (by command) or ``failed``."""
    recovered_layout: str = ""
    right_state: bool = False
    """Committed states are those of the undisturbed run, and so is the end."""
    largest_difference: float = 0.0
    """Relative, of parameters at the end; 0.0: the same bits."""
    hang: bool = False
    orphans: int = 0
    named: str = ""
    """The rank the first report names."""
    rightly_named: bool = True
    detection_s: float | None = None
    """From the fault until the run had ended, or until it was reported."""
    restart_s: float | None = None
    """From then (or from the command that resumed it) until the next step was finished."""
    lost_steps: int | None = None
    """Finished steps that were done again."""
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        return asdict(self)


class Campaign:
    """Runs entries in one folder. ``reference`` runs of a layout are made once, on pools of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.job = folder, folder / "job.toml"
        self._pools: dict[int, RankPool] = {}
        self._references: dict[str, Path] = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "corpus.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
        self.job.write_text(JOB)

    def close(self) -> None:
        """End the pools."""
        for pool in self._pools.values():
            pool.close()

    def reference(self, layout: str) -> Path:
        """The checkpoints of the undisturbed run under a layout, all of them."""
        if layout not in self._references:
            out = self.folder / f"reference-{len(self._references)}"
            ranks = load_job(self.job, layout=layout).layout.ranks
            pool = self._pools.setdefault(ranks, RankPool(ranks))
            pool.run(undisturbed, str(self.job), layout, str(out), timeout=BOUND)
            self._references[layout] = out / "checkpoints"
        return self._references[layout]

    def run(self, entry: Entry) -> Verdict:
        """Do one entry."""
        fault = entry.fault
        verdict = Verdict(
            entry.number, [str(one) for one in entry.faults], fault.kind, fault.rank, fault.step, fault.phase,
            entry.layout,
        )  # fmt: skip
        reference = self.reference(entry.layout)
        out = self.folder / f"run-{entry.number}"
        attempt = _Attempt(self.job, out, entry, entry.layout, resume=False)
        attempt.follow(verdict)
        fired = Fired(out)
        verdict.fired = all(fired.has(name) for name, _ in named(entry.faults))
        self._judge_naming(entry, attempt, verdict)
        if attempt.code == 0:
            again = len(_events(out, "resumed"))
            verdict.outcome = "recovered" if again else "undisturbed"
            layouts = _events(out, "started", "resumed")
            verdict.recovered_layout = str(layouts[-1]["layout"]) if layouts else ""
            if again and entry.sort.outcome == "undisturbed":
                verdict.problems.append("restarted although nothing was to come of it")
        else:
            self._after_the_end(entry, out, reference, verdict, attempt)
        self._judge_end(out, reference, verdict)
        if not verdict.problems and not verdict.hang and verdict.right_state:
            shutil.rmtree(out)
        return verdict

    def _after_the_end(self, entry: Entry, out: Path, reference: Path, verdict: Verdict, attempt: _Attempt) -> None:
        """The first command ended early: what it left must be right, and it must go on from there."""
        if entry.sort.outcome == "undisturbed":
            verdict.problems.append(f"ended although nothing was to come of it: {attempt.said}")
        happened = _events(out, "fault")
        if happened and not verdict.hang:
            verdict.detection_s = max(0.0, attempt.ended - float(happened[-1]["time"]))
        before = _last_step(out)
        for step in steps(out / "checkpoints")[-1 - len(entry.faults) :]:
            damage = entry.sort.then_kill and step == entry.fault.step
            if not damage and not _same(step_folder(out / "checkpoints", step), step_folder(reference, step)):
                verdict.problems.append(f"committed step {step} is not that of the undisturbed run")
        second = _Attempt(self.job, out, entry, entry.resume_layout, resume=True)
        second.follow(verdict)
        verdict.outcome = "resumed" if second.code == 0 else "failed"
        verdict.recovered_layout = entry.resume_layout
        if second.code != 0:
            verdict.problems.append(f"resuming: {second.said}")
            return
        resumed = int(_events(out, "resumed")[-1]["step"])
        verdict.lost_steps = max(0, before - resumed)
        rows = [row for row in read_json_lines(out / "metrics.jsonl") if row.get("step") == resumed + 1]
        if rows:
            verdict.restart_s = float(rows[0]["time"]) - second.began
        if len(_events(out, "fault")) != len(entry.faults):
            verdict.problems.append("a fault happened more or less often than once")

    def _judge_naming(self, entry: Entry, attempt: _Attempt, verdict: Verdict) -> None:
        verdict.named = attempt.named()
        if entry.blamed is not None and (attempt.code != 0 or verdict.named):
            verdict.rightly_named = verdict.named == str(entry.blamed)

    def _judge_end(self, out: Path, reference: Path, verdict: Verdict) -> None:
        last = latest(out / "checkpoints")
        if last is None or last.name != f"step-{STEPS}":
            verdict.problems.append(f"it did not come to step {STEPS}")
            return
        whole = reference / last.name
        rows = [row["step"] for row in read_json_lines(out / "metrics.jsonl") if "loss" in row]
        if rows != list(range(1, STEPS + 1)):
            verdict.problems.append(f"the records have steps {rows}")
        if _plain(verdict.recovered_layout) == _plain(verdict.layout):
            if not _same(last, whole):
                verdict.problems.append("the end is not bit-equal to that of the undisturbed run")
        else:
            verdict.largest_difference = _difference(last, whole)
            if not verdict.largest_difference <= TOLERANCE:
                verdict.problems.append(f"parameters differ by {verdict.largest_difference:.1e}")
        verdict.right_state = not verdict.problems


class _Attempt:
    """One command, from its start to the end of its last process."""

    def __init__(self, job: Path, out: Path, entry: Entry, layout: str, *, resume: bool) -> None:
        self._token = f"{os.getpid()}-{entry.number}-{resume}"
        self._out = out
        texts = json.dumps([str(fault) for fault in entry.faults])
        words = ["train", job, "--out", out, "--layout", f"{layout} micro_batch=1", "--json",
                 "--set", f"fault.inject={texts}", *(["--resume"] if resume else [])]  # fmt: skip
        self.began = time.time()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.cli.main", *map(str, words)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self._token},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.code, self.ended, self.errors = 0, self.began, ""

    @property
    def said(self) -> str:
        """The first line on standard error."""
        return next(iter(self.errors.strip().splitlines()), f"exit code {self.code}")

    def follow(self, verdict: Verdict) -> None:
        """Wait for the end; what hangs is killed, what stays behind is counted and killed."""
        try:
            _, self.errors = self._process.communicate(timeout=BOUND)
        except subprocess.TimeoutExpired:
            verdict.hang = True
            verdict.problems.append(f"it had not ended after {BOUND:.0f} s")
            for process in self._alive():
                _kill(process)
            _, self.errors = self._process.communicate()
        self.code, self.ended = self._process.returncode, time.time()
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        verdict.orphans += len(alive)
        if alive:
            verdict.problems.append(f"{len(alive)} processes outlived it")
        for process in alive:
            _kill(process)

    def _alive(self) -> list[psutil.Process]:
        """Every process that carries this attempt's mark and has not ended."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._token and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def named(self) -> str:
        """The rank that the report of a failure says is the cause, or an empty text."""
        # A save fails on all ranks alike, with the one that could not write in brackets.
        match = re.search(r"could not be saved to \S+ \(rank (\d+):", self.errors)
        match = match or re.search(r"\brank (\d+) of \d+ failed", self.errors)
        return match[1] if match else ""


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return


def _events(out: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(out / "events.jsonl") if event["event"] in kinds]


def _plain(layout: str) -> str:
    """A layout in its one form."""
    return str(parse_layout(layout).model_copy(update={"micro_batch": 1}))


def _last_step(out: Path) -> int:
    return max((int(row["step"]) for row in read_json_lines(out / "metrics.jsonl") if row.get("applied")), default=0)


def _same(left: Path, right: Path) -> bool:
    """Whether two checkpoints hold the same tensors to the bit, and the same state."""
    found = compare_checkpoints(left, right)
    return found.same_tensors and not any(key.startswith("state.") for key in found.facts)


def _difference(left: Path, right: Path) -> float:
    """max|a - b| of a parameter over max(max|b|, lr x steps), over all parameters."""
    one, two = read_manifest(left), read_manifest(right)
    worst = 0.0
    for key in two.tensors:
        role, _, name = key.partition("/")
        if role == "parameter":
            a, b = (read_tensor(manifest, name).numpy() for manifest in (one, two))
            gap = float(numpy.nan_to_num(numpy.abs(a - b), nan=numpy.inf).max())
            worst = max(worst, gap / max(float(numpy.abs(b).max()), _RATE * STEPS))
    return worst


def undisturbed(job: str, layout: str, out: str) -> None:
    """On a rank of a pool: the run that nothing happens to; every checkpoint is kept."""
    loaded = load_job(job, ["checkpoint.keep=1000", "checkpoint.every=1"], f"{layout} micro_batch=1").resolve()
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with Mesh(loaded.layout) as mesh:
        loop = TrainingLoop(loaded, mesh, folder, device=torch.device("cpu"), resume=False, quiet=True)
        loop.run()


def entries_done(verdicts: Sequence[Verdict]) -> int:
    """How many came through with nothing wrong."""
    return sum(1 for verdict in verdicts if verdict.fired and verdict.rightly_named and not verdict.problems)
