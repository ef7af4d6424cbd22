"""One run of the fault campaign: started as a user starts it, watched, resumed where it ended, judged."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy
import torch

from bench.fault_attempt import Attempt
from bench.fault_draw import EVERY, STEPS, Entry, Group
from meshwright.checkpoint.compare import compare_checkpoints
from meshwright.checkpoint.folder import latest, step_folder, steps
from meshwright.checkpoint.load import read_tensor
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.verify import damage
from meshwright.comm.mesh import Mesh
from meshwright.job.job import load_job
from meshwright.job.layout_text import parse_layout
from meshwright.observe.records import read_json_lines
from meshwright.prove.pool import RankPool
from meshwright.train.faults.fired import Fired, named
from meshwright.train.loop import TrainingLoop

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
    """What became of one fault."""

    number: int
    run: int
    faults: list[str]
    kind: str
    rank: int
    step: int
    phase: str
    layout: str
    fired: bool = False
    outcome: str = ""
    """``undisturbed``, ``recovered`` (by itself) or ``resumed`` (by command)."""
    recovered_layout: str = ""
    right_state: bool = False
    """What its run had committed then, and its end, are those of the undisturbed run."""
    largest_difference: float = 0.0
    """Relative, of parameters at the end of its run; 0.0: the same bits."""
    hang: bool = False
    orphans: int = 0
    named: str = ""
    """The rank that the report says is the cause."""
    rightly_named: bool = True
    detection_s: float | None = None
    """From the fault until it was reported, or until the command had ended."""
    restart_s: float | None = None
    """From then (or from the command that resumed it) until the next step was finished."""
    lost_steps: int | None = None
    """Finished steps that were done again."""
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.fired and self.right_state and self.rightly_named and not self.problems

    def as_json(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        return asdict(self)


class Campaign:
    """Does runs in one folder. ``reference`` runs of a layout are made once.

    Args:
        folder: new or empty.
        pool: gives a pool of so many ranks, which stays somebody else's; absent: one is started for each reference.
    """

    def __init__(self, folder: Path, pool: Callable[[int], RankPool] | None = None) -> None:
        self.folder, self.job = folder, folder / "job.toml"
        self._pool = pool
        self._references: dict[str, Path] = {}
        self._making = Lock()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "corpus.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
        self.job.write_text(JOB)

    def reference(self, layout: str) -> Path:
        """The checkpoints of the undisturbed run under a layout, one of every step."""
        with self._making:
            if layout not in self._references:
                out = self.folder / f"reference-{len(self._references)}"
                ranks = load_job(self.job, layout=layout).layout.ranks
                pool = RankPool(ranks) if self._pool is None else self._pool(ranks)
                try:
                    pool.run(undisturbed, str(self.job), layout, str(out), timeout=300)
                finally:
                    if self._pool is None:
                        pool.close()  # sleeping ranks cost turns
                self._references[layout] = out / "checkpoints"
            return self._references[layout]

    def run(self, group: Group) -> list[Verdict]:
        """Do one run: start it, resume it by command as often as it ends, judge what became of each fault."""
        judge = _Judge(group, self.folder / f"run-{group.number}", self.reference(group.layout))
        layout, resume = group.layout, False
        for number in range(len(group.entries) + 2):
            attempt = Attempt(self.job, judge.out, group, layout, number, resume=resume)
            attempt.follow()
            judge.ended(attempt)
            if attempt.code == 0 or attempt.hang:
                break
            layout, resume = group.resume_layout, True
        verdicts = judge.verdicts()
        if all(verdict.good for verdict in verdicts):
            shutil.rmtree(judge.out)
        return verdicts


class _Judge:
    """Looks at what a run left, after each command and at the end."""

    def __init__(self, group: Group, out: Path, reference: Path) -> None:
        self.group, self.out, self.reference = group, out, reference
        self._attempts: list[Attempt] = []
        self._reached: list[int] = []
        """The last finished step at the end of each attempt."""
        self._problems: list[str] = []
        self._orphans = 0

    def ended(self, attempt: Attempt) -> None:
        """A command has ended: what is committed then must be right."""
        self._attempts.append(attempt)
        self._orphans += attempt.orphans
        rows = read_json_lines(self.out / "metrics.jsonl")
        self._reached.append(max((int(row["step"]) for row in rows if row.get("applied")), default=0))
        if attempt.code == 0:
            return
        folder = self.out / "checkpoints"
        harmed = {entry.fault.step for entry in self.group.entries if entry.sort.then_kill}
        for step in steps(folder):
            path = step_folder(folder, step)
            if step in harmed and damage(read_manifest(path)):
                continue
            problem = self._difference_to_undisturbed(path)
            if problem:
                self._problems.append(f"committed step {step}: {problem}")

    def verdicts(self) -> list[Verdict]:
        """One for each fault of the run."""
        self._judge_end()
        fired = Fired(self.out)
        names = {str(fault): name for name, fault in named(self.group.faults)}
        times = {record["fault"]: float(record["time"]) for record in fired.records()}
        events = read_json_lines(self.out / "events.jsonl")
        happened = [event["fault"] for event in events if event["event"] == "fault"]
        if len(happened) != len(set(happened)):
            self._problems.append("a fault happened twice")
        ends = [times.get(str(entry.faults[-1]), math.nan) for entry in self.group.entries]
        result = []
        for place, entry in enumerate(self.group.entries):
            until = next((time_ for time_ in ends[place + 1 :] if not math.isnan(time_)), math.inf)
            verdict = self._verdict(entry, ends[place], until, events)
            verdict.fired = all(fired.has(names[str(fault)]) for fault in entry.faults)
            result.append(verdict)
        result[-1].orphans = self._orphans
        result[-1].hang = self._attempts[-1].hang
        for verdict in result:
            verdict.problems += self._problems
            verdict.right_state = not self._problems
            verdict.largest_difference = self._largest
        return result

    def _verdict(self, entry: Entry, since: float, until: float, events: list[dict[str, Any]]) -> Verdict:
        """What happened between this fault and the next."""
        fault, group = entry.fault, self.group
        verdict = Verdict(
            entry.number, group.number, [str(one) for one in entry.faults], fault.kind, fault.rank, fault.step,
            fault.phase, group.layout,
        )  # fmt: skip
        mine = [event for event in events if since <= float(event["time"]) < until]
        layouts = [event["layout"] for event in events if "layout" in event and float(event["time"]) < until]
        verdict.recovered_layout = str(layouts[-1]) if layouts else ""
        incidents = [event for event in mine if event["event"] == "incident"]
        ended = [number for number, one in enumerate(self._attempts) if since <= one.ended < until and one.code != 0]
        verdict.outcome = "resumed" if ended else "recovered" if incidents else "undisturbed"
        if incidents:
            verdict.detection_s = float(incidents[0]["time"]) - since
            verdict.named = ",".join(map(str, incidents[0]["ranks"]))
            restarting, resumed, recovered = (
                [event for event in mine if event["event"] == kind] for kind in ("restarting", "resumed", "recovered")
            )
            if restarting and resumed:
                # What it meant to go on from may have turned out damaged.
                best = int(restarting[0]["step"]) + int(restarting[0]["lost_steps"])
                verdict.lost_steps = max(0, best - int(resumed[0]["step"]))
            if recovered and not ended:
                verdict.restart_s = float(recovered[-1]["time"]) - float(incidents[0]["time"])
        if ended:
            self._resumed(ended[-1], since, verdict, mine)
        self._judge_outcome(entry, incidents, verdict)
        return verdict

    def _resumed(self, number: int, since: float, verdict: Verdict, mine: list[dict[str, Any]]) -> None:
        """The command ended after this fault, and another one went on."""
        one = self._attempts[number]
        if verdict.detection_s is None:
            verdict.detection_s = one.ended - since
        verdict.named = verdict.named or one.named()
        resumed = [event for event in mine if event["event"] == "resumed" and float(event["time"]) > one.ended]
        if not resumed:
            verdict.problems.append(f"it was not resumed: {self._attempts[-1].said}")
            return
        verdict.lost_steps = max(0, self._reached[number] - int(resumed[0]["step"]))
        rows = [float(row["time"]) for row in read_json_lines(self.out / "metrics.jsonl") if "loss" in row]
        later = [time_ for time_ in rows if time_ > float(resumed[0]["time"]) - 0.01]
        if later:
            verdict.restart_s = min(later) - self._attempts[number + 1].began

    def _judge_outcome(self, entry: Entry, incidents: list[dict[str, Any]], verdict: Verdict) -> None:
        wanted, got = entry.outcome, verdict.outcome
        legal = {
            "undisturbed": ("undisturbed",), "recovers": ("recovered",), "stops": ("resumed",), "lost": ("resumed",),
            "either": ("undisturbed", "recovered", "resumed"),
        }  # fmt: skip
        if got not in legal[wanted]:
            said = incidents[0]["sentence"] if incidents else self._attempts[0].said
            verdict.problems.append(f"{got}, where {' or '.join(legal[wanted])} is right: {said}")
        if wanted == "recovers" and len(incidents) > 1:
            verdict.problems.append(f"{len(incidents)} incidents: {incidents[-1]['sentence']}")
        if entry.blamed is not None and got != "undisturbed":
            verdict.rightly_named = verdict.named == str(entry.blamed)

    _largest = 0.0

    def _judge_end(self) -> None:
        if self._attempts[-1].hang:
            self._problems.append("it hung")
        if self._orphans:
            self._problems.append(f"{self._orphans} processes outlived it")
        last = latest(self.out / "checkpoints")
        if last is None or last.name != f"step-{STEPS}":
            self._problems.append(f"it did not come to step {STEPS}: {self._attempts[-1].said}")
            return
        rows = [row["step"] for row in read_json_lines(self.out / "metrics.jsonl") if "loss" in row]
        if rows != list(range(1, STEPS + 1)):
            self._problems.append(f"the records have steps {rows}")
        problem = self._difference_to_undisturbed(last)
        if problem:
            self._problems.append(f"the end: {problem}")

    def _difference_to_undisturbed(self, path: Path) -> str | None:
        """What is wrong with a checkpoint: bits, as long as every layout was the same; the bound otherwise."""
        whole = self.reference / path.name
        events = read_json_lines(self.out / "events.jsonl")
        layouts = {_plain(str(event["layout"])) for event in events if "layout" in event}
        if layouts == {_plain(self.group.layout)}:
            found = compare_checkpoints(path, whole)
            same = found.same_tensors and not any(key.startswith("state.") for key in found.facts)
            return None if same else "its bits are not those of the undisturbed run"
        self._largest = max(self._largest, _difference(path, whole))
        return None if self._largest <= TOLERANCE else f"parameters differ by {self._largest:.1e}"


def _plain(layout: str) -> str:
    """A layout in its one form."""
    return str(parse_layout(layout).model_copy(update={"micro_batch": 1}))


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
