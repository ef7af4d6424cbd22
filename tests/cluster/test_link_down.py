"""The link between two hosts goes down for longer than the bound, and comes back: the run goes on without a hand.

Each host's torchrun is started again when it ends with an error, as Kubernetes or a loop would; in the other recipe
torchrun itself starts its ranks again and never ends.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from meshwright.checkpoint.folder import steps
from meshwright.checkpoint.verify import verify
from tests.cluster.hosts import TwoHosts
from tests.command_line import settings, write_job
from tests.fault.test_train import assert_same_bits, records

BOUND, DOWN, STEPS, CUT_AFTER = 15.0, 30.0, 400, 40
"""Seconds of ``recovery.collective_after`` and of the cut; steps of the run, and that after which it is cut."""
LATE = 15.0
"""Seconds that a loaded machine may take to say what is due."""
DEADLINE = 240.0
RUN = settings(
    f"train.steps={STEPS}", "checkpoint.every=5", "checkpoint.keep=500", "optimizer.schedule=cosine",
    "recovery.stopped_after=3.0", "recovery.handover=2.0", "recovery.hang_after=5.0", "recovery.setup_after=8.0",
    f"recovery.collective_after={BOUND}",
)  # fmt: skip


@dataclass
class Said:
    """What a host's torchrun, all its attempts, wrote, each line with its time."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def lost(self, since: float) -> list[tuple[float, str]]:
        """The sentences of ranks that lost another one."""
        found = re.compile(r"^(?:\[[^]]*\]:)?(rank \d of \d lost ranks? .*)")
        return [(when - since, match[1]) for when, line in list(self.lines) if (match := found.match(line))]

    def end(self, deadline: float) -> None:
        code = self.process.wait(max(0.1, deadline - time.monotonic()))
        self._reader.join(10)
        assert code == 0, self.text()


def begin(hosts: TwoHosts, recipe: str, job: Path, out: Path) -> list[Said]:
    words = ["train", str(job), "--out", str(out), *RUN]
    if recipe == "started again":
        words.append("--resume-or-start")
    said = []
    for host, command in enumerate(hosts.torchrun(1, "meshwright.cli.main", words)):
        if recipe == "max-restarts":
            at = command.index("--nnodes")
            command[at:at] = ["--max-restarts", "20"]
        else:
            command = ["sh", "-c", f"until {shlex.join(command)}; do sleep 1; done"]
        said.append(Said(hosts.start(host, command)))
    return said


def wait_for_step(out: Path, step: int, said: list[Said], deadline: float) -> None:
    while not ((path := out / "metrics.jsonl").exists() and (seen := records(path)) and seen[-1]["step"] >= step):
        assert time.monotonic() < deadline, "\n--- ".join(one.text() for one in said)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def undisturbed(hosts: TwoHosts, job: Path) -> Iterator[Path]:
    """A run on the same hosts that nothing happens to."""
    out = job.parent / "undisturbed"
    if not out.exists():
        for one in begin(hosts, "max-restarts", job, out):
            one.end(time.monotonic() + DEADLINE)
    yield out


def begun(out: Path) -> list[dict[str, Any]]:
    return [event for event in records(out / "events.jsonl") if event["event"] in ("started", "resumed")]


@pytest.mark.all
@pytest.mark.timeout(800)
@pytest.mark.parametrize(("recipe", "cut"), [("max-restarts", 1), ("started again", 1), ("started again", 0)])
def test_a_link_that_goes_down_and_comes_back(
    hosts: TwoHosts, job: Path, undisturbed: Path, recipe: str, cut: int
) -> None:
    out = job.parent / f"{recipe}-{cut}".replace(" ", "-")
    deadline = time.monotonic() + DEADLINE
    said = begin(hosts, recipe, job, out)
    wait_for_step(out, CUT_AFTER, said, deadline)
    hosts.set_link(cut, "down")
    down = time.monotonic()
    before = steps(out / "checkpoints")
    assert len(begun(out)) == 1 and before and before[-1] < STEPS
    while time.monotonic() < down + DOWN or not all(one.lost(down) for one in said):
        assert time.monotonic() < down + DOWN + LATE, "\n--- ".join(one.text() for one in said)
        # Every folder that counts is whole, at any moment.
        for step in steps(out / "checkpoints"):
            assert verify(out / "checkpoints" / f"step-{step}").step == step
        time.sleep(0.5)
    # Each side noticed within the bound, and named whom it waited for, and in what.
    for host, one in enumerate(said):
        after, sentence = one.lost(down)[0]
        assert BOUND - 2 < after < BOUND + LATE, sentence
        waited = re.match(rf"rank {host} of 2 lost rank {1 - host} after waiting (\d+\.\d) s ", sentence)
        assert waited and BOUND - 1 < float(waited[1]) < BOUND + LATE, sentence
        assert re.search(r"in step \d+, [a-z]+.*, in \w+ number \d+ of \w+ \(ranks 0, 1\): ", sentence), sentence
    # What one side may have committed without the other's knowledge is the one checkpoint that was under way.
    after_cut = steps(out / "checkpoints")
    assert after_cut[: len(before)] == before and len(after_cut) <= len(before) + 1
    assert len(begun(out)) == 1, "nobody trains while the link is down"
    rows = len(records(out / "metrics.jsonl"))
    hosts.set_link(cut, "up")
    for one in said:
        one.end(deadline)
    events = begun(out)
    assert [event["event"] for event in events] == ["started", "resumed"], json.dumps(events)
    assert events[1]["step"] == after_cut[-1] and "superseded" not in events[1]
    assert rows >= after_cut[-1], "rows beyond the checkpoint are those of the lost course"
    for step in steps(out / "checkpoints"):
        assert verify(out / "checkpoints" / f"step-{step}").step == step
    assert steps(out / "checkpoints") == list(range(5, STEPS + 1, 5))
    assert_same_bits(out, undisturbed)
