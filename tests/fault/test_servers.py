"""``meshwright train`` with a parameter server: real processes that are killed and stopped, and the bits that result.

In synchronous and deterministic mode the bits depend neither on the number of workers nor on who computes what, so
every run here that somebody disturbed is held against an undisturbed one on a single device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from meshwright.checkpoint.folder import latest
from meshwright.checkpoint.load import read_tensor
from meshwright.checkpoint.verify import verify
from tests.command_line import settings, start

STEPS = 120
DEADLINE = 120.0
"""Seconds that a run may take with everything that is done to it, on a busy machine."""
SHARED = settings(
    f"train.steps={STEPS}", "train.deterministic=true", "layout.micro_batch=1", "optimizer.clip_norm=1",
    "checkpoint.every=40",
)  # fmt: skip
SHORT_STEPS = 40
SHORT = [*SHARED, *settings(f"train.steps={SHORT_STEPS}", "checkpoint.every=20")]
SERVERS = settings(
    "sync.strategy=server", "sync.servers=2", "sync.server_replicas=2", "sync.server_timeout=20", "layout.dp=2"
)


@pytest.fixture(scope="module")
def alone(job: Path) -> Path:
    """The run of one device that nobody disturbs."""
    return undisturbed(job, "alone", SHARED)


@pytest.fixture(scope="module")
def shortly_alone(job: Path) -> Path:
    """The same, of ``SHORT``."""
    return undisturbed(job, "shortly-alone", SHORT)


def undisturbed(job: Path, name: str, words: Sequence[str]) -> Path:
    out = job.parent / name
    output, errors = start("train", job, "--out", out, *words, "--set", "layout.dp=1").communicate(timeout=DEADLINE)
    assert "run directory" in output, output + errors
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not any(record["step"] >= step for record in lines(out / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not get on"
        time.sleep(0.02)


def begin_long(begin: Callable[..., subprocess.Popen[str]], job: Path, out: Path) -> subprocess.Popen[str]:
    """A run that goes on until it is stopped, two steps into it."""
    process = begin("train", job, "--out", out, *SERVERS, "--set", "train.steps=20000")
    wait_for_step(out, 2, process)
    return process


def by_hand(out: Path, *words: object) -> subprocess.Popen[str]:
    """A process of a run that its launcher did not start."""
    return start(out, *words, prefix=("-m", "meshwright.train.servers.process"))


def pid_of(out: Path, role: str) -> int:
    """The newest process of a role, such as ``worker-0``, or ``head-1`` for the head of shard 1."""
    events = lines(out / "events.jsonl")
    if role.startswith("head-"):
        shard = int(role.removeprefix("head-"))
        name = next(each["chains"] for each in events if each["event"] == "servers-ready")[shard][0]
        for each in events:
            if each["event"] == "new-head" and each["shard"] == shard:
                name = each["server"]
    else:
        name = [each["process"] for each in events if each["event"] == "process-started"
                and each["process"].startswith(f"{role}.")][-1]  # fmt: skip
    return int(next(each["pid"] for each in events if each["event"] == "process-started" and each["process"] == name))


def kinds(out: Path) -> list[str]:
    return [each["event"] for each in lines(out / "events.jsonl")]


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, output + errors
    return output + errors


def assert_same_bits(out: Path, reference: Path, steps: int = STEPS) -> None:
    """Every step once, with the same loss and norm, and the last checkpoints equal to the last bit."""
    mine, other = ([r for r in lines(run / "metrics.jsonl") if "loss" in r] for run in (out, reference))
    assert [record["step"] for record in mine] == list(range(1, steps + 1))
    keys = ("loss", "gradient_norm", "learning_rate", "valid_tokens")
    assert [[record[key] for key in keys] for record in mine] == [[record[key] for key in keys] for record in other]
    left, right = verify(latest(out / "checkpoints") or out), verify(latest(reference / "checkpoints") or out)
    names = ("cursor", "seed", "samples", "optimizer_steps", "loss_scale")
    assert [left.state[name] for name in names] == [right.state[name] for name in names]
    assert left.tensors.keys() == right.tensors.keys()
    for key in left.tensors:
        role, name = key.split("/", 1)
        assert torch.equal(read_tensor(left, name, role), read_tensor(right, name, role)), key  # type: ignore[arg-type]


def nobody_left(out: Path, seconds: float = 10.0) -> bool:
    pids = [each["pid"] for each in lines(out / "events.jsonl") if each["event"] == "process-started"]
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.all
def test_a_killed_worker_and_a_killed_primary_change_no_bit(
    begin: Callable[..., subprocess.Popen[str]], job: Path, shortly_alone: Path
) -> None:
    out = job.parent / "killed"
    process = begin("train", job, "--out", out, *SHORT, *SERVERS)
    wait_for_step(out, 5, process)
    os.kill(pid_of(out, "worker-0"), signal.SIGKILL)
    wait_for_step(out, 15, process)
    os.kill(pid_of(out, "head-1"), signal.SIGKILL)
    finish(process)
    assert {"worker-lost", "server-lost", "new-head", "done"} <= set(kinds(out))
    assert_same_bits(out, shortly_alone, SHORT_STEPS)
    assert nobody_left(out) and not (out / "servers.token").exists()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["servers"]["ledger_differences"] == []


@pytest.mark.all
def test_a_stopped_run_goes_on_without_servers_and_a_stopped_run_with_them(
    begin: Callable[..., subprocess.Popen[str]], job: Path, alone: Path
) -> None:
    out = job.parent / "stopped"
    process = begin("train", job, "--out", out, *SHARED, "--set", "layout.dp=1")
    wait_for_step(out, 15, process)
    process.send_signal(signal.SIGTERM)
    finish(process, 1)
    process = begin("train", job, "--out", out, "--resume", *SHARED, *SERVERS, *settings("sync.server_replicas=1"))
    wait_for_step(out, 60, process)
    process.send_signal(signal.SIGTERM)
    assert "stopped by a signal after step" in finish(process, 1)
    assert nobody_left(out)
    finish(begin("train", job, "--out", out, "--resume", *SHARED, "--set", "layout.dp=1"))
    assert_same_bits(out, alone)


@pytest.mark.all
def test_the_launcher_s_death_is_everybody_s_and_the_run_resumes(
    begin: Callable[..., subprocess.Popen[str]], job: Path, alone: Path
) -> None:
    out = job.parent / "launcher"
    process = begin("train", job, "--out", out, *SHARED, *SERVERS)
    wait_for_step(out, 50, process)
    process.kill()
    process.wait()
    assert nobody_left(out)
    finish(begin("train", job, "--out", out, "--resume", *SHARED, *SERVERS))
    assert_same_bits(out, alone)


@pytest.mark.all
@pytest.mark.parametrize("role", ["worker-0", "head-0", "head-1"])
def test_one_that_is_stopped_for_ten_seconds_holds_nobody_for_longer_than_the_timeout(
    begin: Callable[..., subprocess.Popen[str]], job: Path, alone: Path, role: str
) -> None:
    out = job.parent / f"stopped-{role}"
    process = begin("train", job, "--out", out, *SHARED, *SERVERS, *settings("sync.server_timeout=3"))
    wait_for_step(out, 10, process)
    pid = pid_of(out, role)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(10.0)
    reached = max(record["step"] for record in lines(out / "metrics.jsonl"))
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGCONT)
    finish(process)
    assert reached > 11, "nobody went on while it was stopped"
    assert_same_bits(out, alone)


@pytest.mark.all
@pytest.mark.parametrize(
    "mode",
    [
        ["sync.server_mode=asynchronous", "sync.stale_rate=inverse"],
        ["sync.server_mode=stale-synchronous", "sync.staleness_bound=2"],
        ["sync.backup_workers=1", "layout.dp=3"],
    ],
)
@pytest.mark.parametrize("role", ["worker-0", "head-0"])
def test_every_mode_goes_on_after_a_kill(
    begin: Callable[..., subprocess.Popen[str]], job: Path, mode: list[str], role: str
) -> None:
    out = job.parent / f"{mode[0].replace('.', '-')}-{role}"
    pairs = settings(f"train.steps={STEPS}", "layout.micro_batch=1", *mode)
    process = begin("train", job, "--out", out, *SERVERS, *pairs)
    wait_for_step(out, 20, process)
    os.kill(pid_of(out, role), signal.SIGKILL)
    finish(process)
    updates = lines(out / "updates.jsonl")
    pushes = [(push["worker"], push["sequence"]) for update in updates for push in update["pushes"]]
    samples = [(push["first"], push["slot"]) for update in updates for push in update["pushes"]]
    assert len(pushes) == len(set(pushes)) and len(samples) == len(set(samples))
    assert [update["update"] for update in updates] == list(range(1, len(updates) + 1))
    assert nobody_left(out)


@pytest.mark.all
def test_a_stranger_worker_is_refused_and_the_run_is_as_if_it_had_not_come(
    begin: Callable[..., subprocess.Popen[str]], job: Path, alone: Path
) -> None:
    from meshwright.sync.server.protocol import Refused, Run
    from meshwright.sync.server.sockets import dial

    out = job.parent / "stranger"
    process = begin("train", job, "--out", out, *SHARED, *SERVERS)
    wait_for_step(out, 5, process)
    facts = json.loads((out / "servers.json").read_text())
    assert oct((out / "servers.token").stat().st_mode & 0o777) == "0o600"
    host, port = facts["coordinator"]
    assert host == "127.0.0.1"
    with pytest.raises(Refused):
        dial((host, port), Run("guess", facts["job"]), "worker-7")
    with pytest.raises(Refused):
        dial((host, port), Run((out / "servers.token").read_text(), "another"), "worker-7")
    finish(process)
    assert kinds(out).count("refused") == 2
    assert_same_bits(out, alone)


@pytest.mark.all
def test_a_second_process_under_a_worker_s_name_is_refused_and_the_first_goes_on(
    begin: Callable[..., subprocess.Popen[str]], job: Path
) -> None:
    out = job.parent / "namesake"
    process = begin_long(begin, job, out)
    name = next(each["worker"] for each in lines(out / "events.jsonl") if each["event"] == "worker-joined")
    said = finish(by_hand(out, "--worker", 0, "--name", name), 2).splitlines()
    assert len(said) == 1 and f"{name}: another process of this run has this name" in said[0]
    wait_for_step(out, max(record["step"] for record in lines(out / "metrics.jsonl")) + 2, process)
    process.send_signal(signal.SIGTERM)
    finish(process, 1)
    assert not {"process-ended", "worker-lost"} & set(kinds(out)) and kinds(out).count("refused") == 1


def test_workers_that_are_started_elsewhere_share_the_work(
    begin: Callable[..., subprocess.Popen[str]], job: Path, shortly_alone: Path
) -> None:
    out = job.parent / "elsewhere"
    process = begin("train", job, "--out", out, *SHORT, *SERVERS, "--set", "sync.workers_elsewhere=1")
    while not (out / "servers.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    other = by_hand(out, "--worker", 1, "--name", "other")
    assert "only processes of this machine reach 127.0.0.1; for others, set sync.server_host to" in finish(process)
    finish(other)
    assert sum(each["event"] == "process-started" and each["process"].startswith("worker")
               for each in lines(out / "events.jsonl")) == 1  # fmt: skip
    shares = [push["worker"] for update in lines(out / "updates.jsonl") for push in update["pushes"]]
    assert 0 < shares.count("other") < len(shares)
    assert_same_bits(out, shortly_alone, SHORT_STEPS)


@pytest.mark.all
def test_a_worker_joins_by_the_run_s_directory_and_leaves(
    begin: Callable[..., subprocess.Popen[str]], job: Path
) -> None:
    out = job.parent / "joined"
    process = begin_long(begin, job, out)
    guest = by_hand(out, "--worker", 2, "--name", "guest")
    deadline = time.monotonic() + DEADLINE
    while not any(each.get("worker") == "guest" for each in lines(out / "events.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before the guest had come"
        time.sleep(0.02)
    guest.terminate()
    finish(guest)
    process.send_signal(signal.SIGTERM)
    finish(process, 1)
    assert {"worker-joined", "worker-left"} <= {each["event"] for each in lines(out / "events.jsonl")
                                                if each.get("worker") == "guest"}  # fmt: skip
