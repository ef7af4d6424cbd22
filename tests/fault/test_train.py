"""``meshwright train`` as a user runs it: to the end, through kills and signals, and on from there to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from meshwright.checkpoint.folder import latest, steps
from meshwright.checkpoint.load import read_tensor
from meshwright.checkpoint.verify import verify
from tests.command_line import settings, start

LONG = 150
"""Steps of a run that is to be stopped: more than it takes to reach it, few enough to finish."""
DEADLINE = 100.0


@pytest.fixture(scope="module")
def whole(job: Path) -> Path:
    """The long run that nobody interrupts."""
    out = job.parent / "whole"
    output, errors = (process := start("train", job, "--out", out, *LONG_RUN)).communicate(timeout=DEADLINE)
    assert process.returncode == 0, output + errors
    return out


LONG_RUN = settings(f"train.steps={LONG}", "checkpoint.every=10", "optimizer.schedule=cosine", "optimizer.clip_norm=1")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the run is past ``step``."""
    deadline = time.monotonic() + DEADLINE
    while True:
        path = out / "metrics.jsonl"
        if path.exists() and (seen := records(path)) and seen[-1]["step"] > step:
            return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not get on"
        time.sleep(0.02)


def ranks_of(out: Path, ranks: int = 2, attempt: int = 1) -> list[psutil.Process]:
    folder = out / "logs" / f"attempt-{attempt}"
    return [psutil.Process(json.loads((folder / f"rank-{rank}.json").read_text())["pid"]) for rank in range(ranks)]


def all_gone(processes: list[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def course(out: Path) -> list[tuple[Any, ...]]:
    """What the steps of a run came to, without times; every step must stand once, in order."""
    rows = [record for record in records(out / "metrics.jsonl") if "loss" in record]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [(row["loss"], row["gradient_norm"], row["learning_rate"], row["valid_tokens"]) for row in rows]


def assert_same_bits(out: Path, reference: Path) -> None:
    """Equal courses, and final checkpoints equal to the last bit of every tensor and of the state."""
    assert course(out) == course(reference)
    mine, other = (latest(run / "checkpoints") for run in (out, reference))
    assert mine is not None and other is not None and mine.name == other.name
    left, right = verify(mine), verify(other)
    assert left.state == right.state
    assert left.tensors.keys() == right.tensors.keys() and len(left.tensors) > 40
    for key in left.tensors:
        role, name = key.split("/", 1)
        one, two = (read_tensor(manifest, name, role).numpy() for manifest in (left, right))  # type: ignore[arg-type]
        assert np.array_equal(one.view(np.uint8), two.view(np.uint8)), key


def resume(begin: Callable[..., subprocess.Popen[str]], job: Path, out: Path) -> None:
    process = begin("train", job, "--out", out, "--resume", *LONG_RUN)
    output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output + errors


def test_a_run_leaves_everything_it_promises(begin: Callable[..., subprocess.Popen[str]], job: Path) -> None:
    out = job.parent / "finished"
    pairs = settings("observe.one_device_steps=2", "data.validation=0.2", "train.eval_every=3", "checkpoint.every=3")
    process = begin("train", job, "--out", out, "--json", *pairs, *settings('observe.sample_prompt="2 times"'))
    output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output + errors
    entries = {path.name for path in out.iterdir()}
    assert entries >= {
        "job.toml", "metrics.jsonl", "events.jsonl", "ledger.json", "summary.json", "checkpoints", "logs", "ranks",
    }  # fmt: skip
    assert not [name for name in entries if name.startswith(".")], "half-written files are left"
    assert steps(out / "checkpoints") == [3, 6]
    summary = json.loads((out / "summary.json").read_text())
    assert json.loads(output.splitlines()[-1]) == summary
    assert (summary["outcome"], summary["steps"], summary["ranks"]) == ("done", 6, 2)
    rate, alone = summary["tokens_per_second"], summary["one_device_tokens_per_second"]
    assert summary["useful_speedup"] == pytest.approx(rate / alone)
    assert summary["efficiency"] == pytest.approx(rate / alone / 2)
    assert 0 < summary["validation_loss"] < 10 and summary["validation_unigram_entropy"] > 0
    assert isinstance(summary["sample"], str)
    assert len(course(out)) == 6
    validated = [record["step"] for record in records(out / "metrics.jsonl") if "validation_loss" in record]
    assert validated == [3, 6]
    first = records(out / "metrics.jsonl")[0]
    assert first["total_tokens"] == 4 * 32 and 0 < first["valid_tokens"] <= first["total_tokens"]
    assert [row["loss"] for row in records(out / "ranks" / "metrics-00001.jsonl") if "loss" in row] == [
        row[0] for row in course(out)
    ]
    assert json.loads((out / "ledger.json").read_text())["world"] == 2
    assert records(out / "events.jsonl")[0]["event"] == "started"


def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_bits(
    begin: Callable[..., subprocess.Popen[str]], job: Path, whole: Path
) -> None:
    out = job.parent / "rank-killed"
    process = begin("train", job, "--out", out, *LONG_RUN, *settings("recovery.restarts=0"))
    wait_for_step(out, 12, process)
    ranks = ranks_of(out)
    ranks[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - began < 15
    assert process.returncode == 1
    assert errors.lstrip().startswith("rank 1 of 2 failed: killed by SIGKILL") or (
        "\nrank 1 of 2 failed: killed by SIGKILL" in errors
    )
    assert all_gone(ranks, 10), "ranks outlived the run"
    saved = steps(out / "checkpoints")
    assert saved and saved[-1] < LONG
    resume(begin, job, out)
    resumed = [event["step"] for event in records(out / "events.jsonl") if event["event"] == "resumed"]
    assert resumed == [saved[-1]]
    assert_same_bits(out, whole)


def test_sigterm_saves_and_stops_and_the_run_goes_on_to_the_same_bits(
    begin: Callable[..., subprocess.Popen[str]], job: Path, whole: Path
) -> None:
    out = job.parent / "terminated"
    process = begin("train", job, "--out", out, *LONG_RUN)
    wait_for_step(out, 12, process)
    ranks = ranks_of(out)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1, errors
    last = len(course(out))
    assert json.loads((out / "goodput.json").read_text())["launches"][0]["outcome"] == "stopped"
    assert 12 < last < LONG
    sentence = errors.strip().splitlines()[-1]
    assert sentence == f"stopped by a signal after step {last}; saved, continue with --resume"
    assert steps(out / "checkpoints")[-1] == last, "the step it stopped after, not the last regular checkpoint"
    assert json.loads((out / "summary.json").read_text())["outcome"] == "stopped"
    assert all_gone(ranks, 1)
    resume(begin, job, out)
    assert_same_bits(out, whole)


@pytest.mark.all
def test_kill_9_of_the_launcher_leaves_no_process(
    begin: Callable[..., subprocess.Popen[str]], job: Path, whole: Path
) -> None:
    out = job.parent / "launcher-killed"
    process = begin("train", job, "--out", out, *LONG_RUN)
    wait_for_step(out, 12, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert {rank.pid for rank in ranks_of(out)} <= {child.pid for child in family}
    process.kill()
    assert all_gone(family, 10), "processes outlived their launcher"
    resume(begin, job, out)
    assert_same_bits(out, whole)


def test_a_step_that_is_not_finite_commits_nothing(begin: Callable[..., subprocess.Popen[str]], job: Path) -> None:
    out = job.parent / "not-finite"
    pairs = settings("train.steps=50", "checkpoint.every=1", "checkpoint.keep=50", "optimizer.name=sgd")
    process = begin("train", job, "--out", out, *pairs, *settings("optimizer.lr=1e30"))
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    failed = [event for event in records(out / "events.jsonl") if event["event"] == "not-finite"]
    assert len(failed) == 1
    step = failed[0]["step"]
    assert 1 < step < 50
    assert f"step {step}: loss " in errors and "the update was not applied on any rank" in errors
    rows = [record for record in records(out / "metrics.jsonl") if "loss" in record]
    assert [row["applied"] for row in rows] == [True] * (step - 1) + [False], "nothing ran after it"
    saved = steps(out / "checkpoints")
    assert saved == list(range(1, step)), "it committed a step that did not count"
    for number in saved:
        assert verify(out / "checkpoints" / f"step-{number}").step == number


def test_torchrun_starts_the_ranks(begin: Callable[..., subprocess.Popen[str]], job: Path) -> None:
    ours, theirs = job.parent / "launched", job.parent / "torchrun"
    process = begin("train", job, "--out", ours)
    other = begin(
        "train", job, "--out", theirs,
        prefix=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                "meshwright.cli.main"),
    )  # fmt: skip
    for started in (process, other):
        output, errors = started.communicate(timeout=DEADLINE)
        assert started.returncode == 0, output + errors
    assert_same_bits(theirs, ours)
    assert json.loads((theirs / "summary.json").read_text())["outcome"] == "done"
    assert not (theirs / "logs").exists(), "its launcher, not ours, keeps the logs"


@pytest.mark.all
def test_torchrun_with_the_wrong_number_of_ranks(begin: Callable[..., subprocess.Popen[str]], job: Path) -> None:
    out = job.parent / "wrong-number"
    process = begin(
        "train", job, "--out", out, "--layout", "dp=2",
        prefix=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "meshwright.cli.main"),
    )  # fmt: skip
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0
    assert "is 2 ranks, but there are 1 rank (torchrun)" in errors
    assert not os.path.exists(out)


@pytest.mark.all
def test_under_torchrun_every_rank_leaves_when_the_first_refuses(
    begin: Callable[..., subprocess.Popen[str]], job: Path
) -> None:
    out = job.parent / "taken"
    out.mkdir()
    (out / "thesis.tex").touch()
    process = begin(
        "train", job, "--out", out,
        prefix=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshwright.cli.main"),
    )  # fmt: skip
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0
    assert f"--out: {out} is not empty (it has thesis.tex)" in errors
    assert os.listdir(out) == ["thesis.tex"]


@pytest.mark.all
def test_steps_that_overlap_come_to_the_same_wherever_they_are_drained(
    begin: Callable[..., subprocess.Popen[str]], job: Path
) -> None:
    """Validation, checkpoints and a stop drain a 2BW pipeline; a run that only ends once comes to the same bits."""
    words = ["--layout", "pp=2 schedule=2bw micro_batch=1", *settings("train.steps=14", "data.validation=0.2")]
    drained = settings("train.eval_every=4", "checkpoint.every=3")
    for name, legs in (("undrained", [[]]), ("drained", [[*drained, *settings("train.steps=10")], ["--resume"]])):
        for leg in legs:
            process = begin("train", job, "--out", job.parent / name, *words, *leg)
            output, errors = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0, output + errors
    assert_same_bits(job.parent / "drained", job.parent / "undrained")
