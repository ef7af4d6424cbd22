"""A rank fails and the run goes on by itself, to the same bits. Every case has a bound on elapsed time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.folder import steps
from tests.command_line import settings, start
from tests.fault.test_train import assert_same_bits, course, records

DEADLINE = 100.0
RUN = settings("train.steps=40", "checkpoint.every=10", "optimizer.schedule=cosine", "optimizer.clip_norm=1")

Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def undisturbed(job: Path) -> Path:
    out = job.parent / "undisturbed"
    output, errors = (process := start("train", job, "--out", out, *RUN)).communicate(timeout=DEADLINE)
    assert process.returncode == 0, output + errors
    return out


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in records(out / "events.jsonl") if event["event"] == kind]


def finish(process: subprocess.Popen[str], seconds: float = DEADLINE) -> str:
    output, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, output + errors
    return errors


FAULTS = [
    "raise rank=0 step=4 phase=forward",
    "stop rank=1 step=6 phase=backward seconds=0.7",
    "hang rank=1 step=9 phase=backward",
    "exit rank=1 step=13 phase=reduce",
    "kill rank=0 step=17 phase=publish",
    "stop rank=0 step=20 phase=forward",
    "flip-bit rank=1 step=23 phase=end",
]
LIMITS = settings(
    "recovery.stopped_after=2.0", "recovery.hang_after=5.0", "recovery.handover=4.9", "recovery.digest_every=1"
)


def injected(*faults: str) -> list[str]:
    return settings(f"fault.inject={json.dumps(list(faults))}")


def test_one_run_through_every_kind_of_failure_comes_to_the_same_bits(
    begin: Begin, job: Path, undisturbed: Path
) -> None:
    out = job.parent / "broken"
    errors = finish(begin("train", job, "--out", out, *RUN, *LIMITS, *injected(*FAULTS)), 150)
    incidents, restarts = events(out, "incident"), events(out, "restarting")
    named = [(one["kind"], one["ranks"]) for one in incidents]
    assert named == [
        ("dead", [0]), ("hung", [1]), ("dead", [1]), ("dead", [0]), ("stopped", [0]), ("corrupt", [1]),
    ]  # fmt: skip
    assert [one["source"] for one in restarts] == ["memory"] * 5 + ["disk"]
    assert [one["lost_steps"] for one in restarts][:5] == [0] * 5, "the other replica had every step"
    assert restarts[5]["step"] == 20, "the last checkpoint that was compared"
    assert [one["lost_steps"] for one in events(out, "recovered")] == [0] * 5 + [3]
    assert "InjectedFault" in incidents[0]["sentence"]
    assert incidents[1]["waiters"] == [0] and 5.0 <= incidents[1]["detection_seconds"] < 12.0
    assert "rank 1 of 2 hangs for " in incidents[1]["sentence"] and "in step 9, backward" in incidents[1]["sentence"]
    assert "rank 0 in reduce_scatter number " in incidents[1]["sentence"], "who waits, and in what"
    assert incidents[2]["sentence"].startswith("rank 1 of 2 ended: exit code 3")
    assert incidents[3]["sentence"].startswith("rank 0 of 2 ended: killed by SIGKILL, in step 17, publish")
    assert restarts[3]["step"] == 17, "the other replica has the step that was not written down"
    assert 2.0 <= incidents[4]["detection_seconds"] < 6.0
    assert incidents[5]["sentence"].startswith("after step 23 rank 1 holds other bits of ")
    assert all(one["sentence"] in errors for one in incidents)
    told = json.loads((out / "incident-2" / "incident.json").read_text())
    assert told["positions"]["1"]["step"] == 9 and told["positions"]["0"]["waiting"]
    assert "meshwright" in (out / "incident-2" / "rank-0.stack").read_text(), "the survivor's stacks"
    assert "time.sleep" in (out / "incident-2" / "rank-1.stack").read_text() or (
        "effects.py" in (out / "incident-2" / "rank-1.stack").read_text()
    ), "where it hung"
    assert not list(out.glob("incident-*/memory")), "states in memory are not needed any more"
    alerts = records(out / "alerts.jsonl")
    outcomes = [alert for alert in alerts if alert.get("good") is not None]
    assert len(outcomes) == 6 and all(alert["good"] and alert["in_time"] for alert in outcomes)
    goodput = json.loads((out / "goodput.json").read_text())
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_seconds"], abs=1e-6)
    assert goodput["seconds"]["restart"] > 0 and goodput["seconds"]["detection"] > 6
    assert_same_bits(out, undisturbed)


def test_no_replacement_left_means_fewer_ranks_and_then_all_again(begin: Begin, job: Path) -> None:
    out = job.parent / "fewer"
    pairs = settings("recovery.replacements=0", "recovery.rejoin_after=0.5", "train.steps=120")
    finish(begin("train", job, "--out", out, *RUN, *pairs, *injected("kill rank=0 step=5 phase=forward")))
    assert [event["ranks"] for event in events(out, "layout-changed")] == [1, 2]
    layouts = [event["layout"] for event in events(out, "resumed")]
    assert [layout.startswith("dp=2") for layout in layouts] == [False, True]
    assert len(course(out)) == 120
    assert json.loads((out / "goodput.json").read_text())["seconds"]["degraded"] > 0


@pytest.mark.all
def test_the_last_of_two_ranks_goes_on_without_compression(begin: Begin, job: Path) -> None:
    out = job.parent / "alone"
    pairs = settings("recovery.replacements=0", "sync.compression=int8", "model.vocabulary=512", "model.hidden=64")
    errors = finish(begin("train", job, "--out", out, *RUN, *pairs, *injected("kill rank=1 step=15 phase=forward")))
    (changed,) = events(out, "layout-changed")
    assert (changed["ranks"], changed["set_back"]) == (1, {"sync.compression": "int8"})
    assert "without sync.compression (was int8): sync.compression: int8 has nothing to send with dp=1" in errors
    assert [event["step"] for event in events(out, "resumed")] == [10], "residuals are on the disk alone"
    assert len(course(out)) == 40


@pytest.mark.all
@pytest.mark.parametrize(
    ("pairs", "source", "least"),
    [
        (["recovery.start=cold"], "memory", 14),
        (["recovery.memory=false"], "disk", 10),
        (["layout.zero=1"], "disk", 10),
        (["layout.zero=1", "recovery.memory_every=2"], "memory", 14),
        (["layout.zero=3", "recovery.memory_every=5"], "disk", 10),
        (["recovery.collective_after=1700.0", "recovery.setup_after=900.0"], "memory", 14),
        (["checkpoint.every=100"], "memory", 14),
        (["checkpoint.every=100", "recovery.memory=false"], "start", 0),
        (["checkpoint.mode=async"], "memory", 14),
    ],
)
def test_where_the_state_comes_from(begin: Begin, job: Path, pairs: list[str], source: str, least: int) -> None:
    name = "-".join(pairs).replace("=", "-")
    plain, out = job.parent / f"{name}-whole", job.parent / name
    finish(begin("train", job, "--out", plain, *RUN, *settings(*pairs)))
    finish(begin("train", job, "--out", out, *RUN, *settings(*pairs), *injected("kill rank=1 step=15 phase=forward")))
    (restart,) = events(out, "restarting")
    assert (restart["source"], restart["step"]) == (source, least)
    assert_same_bits(out, plain)


@pytest.mark.all
def test_a_slow_rank_is_reported_and_the_run_goes_on(begin: Begin, job: Path) -> None:
    out = job.parent / "slow"
    pairs = settings("recovery.straggler_steps=5", "recovery.straggler_score=0.6")
    finish(begin("train", job, "--out", out, *RUN, *pairs, *injected("slow rank=1 step=10 seconds=0.6 steps=20")))
    assert [event["rank"] for event in events(out, "straggler")] == [1]
    assert not events(out, "incident")


@pytest.mark.all
def test_torchrun_starts_again_from_the_last_checkpoint(begin: Begin, job: Path, undisturbed: Path) -> None:
    out = job.parent / "torchrun"
    process = begin(
        "train", job, "--out", out, *RUN, *injected("kill rank=1 step=15 phase=forward"),
        prefix=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m",
                "meshwright.cli.main"),
    )  # fmt: skip
    finish(process)
    assert [event["step"] for event in events(out, "resumed")] == [10]
    assert_same_bits(out, undisturbed)


@pytest.mark.all
def test_a_run_that_gets_nowhere_ends_with_its_first_cause(begin: Begin, job: Path) -> None:
    out = job.parent / "nowhere"
    process = begin("train", job, "--out", out, *RUN, *settings("recovery.restarts=2", "train.steps=100000"))
    deadline = time.monotonic() + DEADLINE
    killed: set[int] = set()
    while process.poll() is None:
        assert time.monotonic() < deadline
        for path in sorted((out / "logs").glob("attempt-*/rank-1.json")):
            record = json.loads(path.read_text())
            if record["pid"] not in killed and record["state"] == "running":
                killed.add(record["pid"])
                os.kill(record["pid"], signal.SIGKILL)
        time.sleep(0.005)
    _, errors = process.communicate()
    assert process.returncode == 1 and len(killed) == 3
    assert "rank 1 of 2 failed: killed by SIGKILL; gave up after 2 restarts without a new step" in errors
    assert "the first cause: rank 1 of 2 ended: killed by SIGKILL" in errors
    assert not steps(out / "checkpoints")
