"""Injected faults: every kind does what it says, at its address, only there, and once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.checkpoint.compare import compare_checkpoints
from meshwright.checkpoint.folder import steps
from meshwright.checkpoint.verify import verify
from meshwright.cli.main import main
from meshwright.errors import CheckpointError, InputError
from meshwright.job.fault_section import KINDS, PHASES, SAVE_PHASES, STEP_PHASES, check_faults, parse_fault
from meshwright.job.job import Job, load_job
from meshwright.prove.pool import RankPool, free_port
from meshwright.recovery.rank import LAUNCHER_VARIABLE
from meshwright.train.faults.effects import Site, cut_connections, prepare
from meshwright.train.faults.fired import Fired
from tests.command_line import write_job
from tests.fault.fault_runs import Ran, run_loop

Run = Callable[..., tuple[list[Ran], Path]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_job(tmp_path_factory.mktemp("job"))
    load = load_job(path).resolve()
    from meshwright.data.corpora import open_corpora

    open_corpora(load.data, load.model.vocabulary)
    return path


@pytest.fixture
def run(ranks: Callable[[int], RankPool], job: Path, tmp_path: Path) -> Run:
    """``run("kill ...")``: train under these faults on two ranks; how it ended on each, and the directory."""

    def train(*faults: str, out: str = "run", pairs: tuple[str, ...] = (), resume: bool = False) -> Any:
        folder = tmp_path / out
        folder.mkdir(exist_ok=True)
        sets = ["train.steps=4", "checkpoint.every=2", f"fault.inject={json.dumps(list(faults))}", *pairs]
        return ranks(2).run(run_loop, str(job), str(folder), sets, resume), folder

    return train


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


# --- where ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dp=2 zero=1", "dp=2 zero=3", "tp=2", "pp=2"])
def test_faults_happen_at_their_address_and_only_there(run: Run, layout: str) -> None:
    """One fault in every phase of step 2 on each rank: in the order of the phases, each once, each on its rank."""
    texts = [
        f"hang rank={rank} step=2 phase={phase} seconds=0"
        for phase in reversed(PHASES)
        for rank in range(2)
        if (rank, phase) != (1, "commit")
    ]
    ran, folder = run(*texts, pairs=(f"layout={layout}", "batch.global_size=4"))
    for rank, one in enumerate(ran):
        assert not one.error and one.armed
        assert [fault.phase for fault, _, _ in one.met] == [
            phase for phase in PHASES if rank == 0 or phase != "commit"
        ]
        for fault, done, under_way in one.met:
            assert (fault.rank, fault.step) == (rank, 2)
            assert done == (2 if fault.phase in ("publish", "end", *SAVE_PHASES) else 1)
            assert fault.phase not in ("forward", "backward", "publish") or under_way == fault.phase
    recorded = events(folder, "fault")
    assert sorted(event["fault"] for event in recorded) == sorted(str(parse_fault(text)) for text in texts)
    assert len(Fired(folder).records()) == len(texts)


def test_the_second_micro_batch(run: Run) -> None:
    ran, _ = run(
        "hang rank=1 step=1 phase=backward micro_batch=2 seconds=0", "hang rank=1 step=1 phase=forward seconds=0",
        "hang rank=0 step=1 phase=forward micro_batch=9 seconds=0", pairs=("layout=dp=2 micro_batch=1",),
    )  # fmt: skip
    assert [(fault.phase, fault.micro_batch) for fault, _, _ in ran[1].met] == [("forward", 1), ("backward", 2)]
    assert not ran[0].met, "there is no ninth"


def test_without_faults_nothing_is_in_the_loop(run: Run) -> None:
    ran, folder = run()
    assert not any(one.armed for one in ran)
    assert not (folder / "faults").exists()


def test_once_across_restarts(run: Run) -> None:
    """Step 3 is done twice, its fault happens once; two equal faults are two."""
    faults = ["raise rank=0 step=3 phase=end", "raise rank=1 step=3 phase=end", "hang rank=0 step=3 seconds=0"]
    first, folder = run(*faults, faults[2])
    assert all("InjectedFault: injected fault: raise" in one.error for one in first)
    assert steps(folder / "checkpoints") == [2]
    again, _ = run(*faults, faults[2], resume=True)
    assert [one.error for one in again] == ["", ""] and not any(one.met for one in again)
    assert sorted(event["kind"] for event in events(folder, "fault")) == ["hang", "hang", "raise", "raise"]
    whole, reference = run(out="whole")
    assert not any(one.error for one in whole)
    assert compare_checkpoints(folder / "checkpoints/step-4", reference / "checkpoints/step-4").same_tensors


# --- what ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_nan_of_one_rank_is_seen_by_all(run: Run, phase: str) -> None:
    ran, folder = run(f"nan rank=1 step=3 phase={phase}")
    assert all("TrainingStopped: step 3: " in one.error for one in ran)
    assert events(folder, "not-finite")[0]["step"] == 3
    assert steps(folder / "checkpoints") == [2]


def test_one_bit_of_one_parameter(run: Run) -> None:
    name = "layers.1.mlp.down.weight"
    run(f"flip-bit rank=0 step=4 tensor={name} element=5 bit=3", out="flipped")
    _, whole = run(out="whole")
    found = compare_checkpoints(whole.parent / "flipped/checkpoints/step-4", whole / "checkpoints/step-4")
    assert {key: difference.elements for key, difference in found.values.items()} == {f"parameter/{name}": 1}


def test_slow_steps(run: Run) -> None:
    _, folder = run("slow rank=1 step=2 steps=2 seconds=0.3")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = {row["step"]: row["step_seconds"] for row in rows if "loss" in row}
    assert seconds[2] > 0.25 and seconds[3] > 0.25, "the other rank waits for it"


@pytest.mark.parametrize(
    ("fault", "said"),
    [("disk-full rank=1 step=2", "No space left on device"), ("io-error rank=0 step=2 phase=sync", "Input/output")],
)
def test_a_disk_that_fails(run: Run, fault: str, said: str) -> None:
    ran, folder = run(fault, pairs=('checkpoint.failure="continue"',))
    assert not any(one.error for one in ran)
    failed = events(folder, "save-failed")
    assert len(failed) == 1 and failed[0]["step"] == 2
    assert said in failed[0]["reason"] and f"rank {parse_fault(fault).rank}: " in failed[0]["reason"]
    assert steps(folder / "checkpoints") == [4]


def test_a_write_that_takes_long(run: Run) -> None:
    _, folder = run("hung-write rank=1 step=2 seconds=0.5")
    saved = {event["step"]: event["seconds"] for event in events(folder, "saved")}
    assert saved[2] > 0.5


@pytest.mark.parametrize("kind", ["flip-byte", "truncate", "remove"])
def test_files_that_are_harmed(run: Run, kind: str) -> None:
    _, folder = run(f"{kind} rank=1 step=4", f"{kind} rank=0 step=2 file=metrics.jsonl")
    with pytest.raises(CheckpointError, match="rank-00001"):
        verify(folder / "checkpoints/step-4")
    assert verify(folder / "checkpoints/step-2").step == 2
    assert [event["phase"] for event in events(folder, "fault")] == ["saved", "saved"]


# --- what ends or stops a process ------------------------------------------------------------------------------------


def in_a_child(text: str) -> int:
    """Do a fault in a process of its own; its pid."""
    child = os.fork()
    if child == 0:
        try:
            prepare(parse_fault(text), Site(Path(), 0, cast(Any, None)))()
            time.sleep(30)
        finally:
            os._exit(99)
    return child


def test_kill_and_exit() -> None:
    assert os.WTERMSIG(os.waitpid(in_a_child("kill rank=0 step=1"), 0)[1]) == signal.SIGKILL
    assert os.WEXITSTATUS(os.waitpid(in_a_child("exit rank=0 step=1 code=7"), 0)[1]) == 7


def test_stop_and_go_on() -> None:
    child = in_a_child("stop rank=0 step=1 seconds=0.3")
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    assert os.WIFCONTINUED(os.waitpid(child, os.WCONTINUED)[1]), "after 0.3 s"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


SLEEPER = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"


def test_kill_the_launcher() -> None:
    child = os.fork()
    if child == 0:
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        os.waitpid(in_a_child("kill-launcher rank=0 step=1"), 0)
        os._exit(99)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_kill_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, str(port)])
    monkeypatch.setenv("MASTER_PORT", str(port))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    prepare(parse_fault("kill-store rank=0 step=1"), Site(Path(), 0, cast(Any, None)))()
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_a_cut_link() -> None:
    child = os.fork()
    if child == 0:  # every connection of this process would be cut, so in one of its own
        code = 1
        try:
            with socket.create_server(("127.0.0.1", 0)) as server:
                near = socket.create_connection(server.getsockname())
                far, _ = server.accept()
                cut = cut_connections()
                code = 0 if cut >= 2 and near.recv(1) == b"" and far.recv(1) == b"" else 2
        finally:
            os._exit(code)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 0


def test_every_kind_is_known_to_somebody() -> None:
    handled = {"disk-full", "io-error", "hung-write", "slow", "nan"}
    site = Site(Path(), 0, cast(Any, SimpleNamespace()))
    for kind in KINDS.keys() - handled:
        try:
            prepare(parse_fault(f"{kind} rank=0 step=1"), site)
        except ValueError as error:  # no branch for it
            pytest.fail(str(error))
        except Exception:
            continue  # nothing to do it to


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kil rank=1 step=2", "kil is no kind of fault (did you mean kill?)"),
        ("kill rank=1", "lacks step=; give rank= and step="),
        ("kill step=1 rank=-1", "rank=-1 must be a whole number of at least 0"),
        ("kill rank=1 step=0", "step=0 must be a whole number of at least 1"),
        ("kill rank=1 step=1 seconds=3", "seconds=3 is no part of a kill fault"),
        ("nan rank=0 step=1 phase=save", "nan cannot happen in phase=save; phases are forward, backward"),
        ("kill rank=1 step=2 phase=commit", "phase=commit is rank 0's alone"),
        ("kill rank=1 step=2 micro_batch=2", "micro_batch= needs phase=forward or phase=backward, not start"),
        ("remove rank=0 step=2 file=../x", "file=../x leaves the run directory"),
        ("stop rank=0 step=2 seconds=inf", "seconds=inf must be a number of at least 0"),
        ("", "does not begin with a kind of fault; kinds are kill, stop"),
    ],
)
def test_what_cannot_be_read_is_refused(job: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        load_job(job, [f"fault.inject={json.dumps([text])}"])
    assert str(raised.value).startswith("fault.inject: ") and said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill rank=2 step=1", "there are 2 ranks; use rank=0 to 1"),
        ("kill rank=1 step=7", "train.steps is 6; use step=1 to 6"),
        ("disk-full rank=1 step=3", "no checkpoint is written after step 3; use a multiple of checkpoint.every=2"),
    ],
)
def test_what_can_never_happen_is_refused(job: Path, text: str, said: str) -> None:
    def with_fault(*texts: str) -> Job:
        return load_job(job, [f"fault.inject={json.dumps(texts)}", "checkpoint.every=2"]).resolve()

    with pytest.raises(InputError, match=r"fault\.inject: ") as raised:
        check_faults(with_fault("kill rank=0 step=1", text))
    assert said in str(raised.value) and "\n" not in str(raised.value)
    check_faults(with_fault("disk-full rank=1 step=6", "disk-full rank=1 step=4", "kill rank=1 step=5"))


def test_a_fault_is_its_text() -> None:
    for text in ("kill rank=1 step=5 phase=backward micro_batch=2", "stop rank=0 step=1 phase=end seconds=0.5"):
        assert str(parse_fault(text)) == text
    assert {KINDS[kind].phase for kind in KINDS} <= {*STEP_PHASES, *SAVE_PHASES}


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any, str]:
    with pytest.raises(SystemExit) as left:
        main(["fault", *map(str, words)])
    output = capsys.readouterr()
    return int(left.value.code or 0), output.out, output.err


def test_the_command(run: Run, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for before it starts, taken between steps, shown afterwards; what cannot be is refused."""
    folder = job.parent / "listening"
    folder.mkdir()
    assert command(capsys, folder, "kill rank=0 step=1")[0] == 2
    pairs = ["fault.listen=true", 'fault.inject=["hang rank=0 step=1 seconds=0"]', "train.steps=4"]
    (folder / "job.toml").write_text(load_job(job, pairs).resolve().to_toml())
    for text, said in [
        ("kill rank=7 step=2", "there are 2 ranks"),
        ("kill rank=0", "lacks step="),
    ]:
        code, _, errors = command(capsys, folder, text)
        assert code == 2 and said in errors
    code, out, _ = command(capsys, folder, "hang rank=1 step=3 seconds=0", "--json")
    (name,) = json.loads(out)["asked"]
    assert command(capsys, folder, "hang rank=1 step=2 seconds=0", "--wait", "0.1")[0] == 1, "nobody has run yet"
    ran, _ = run("hang rank=0 step=1 seconds=0", out=str(folder), pairs=("fault.listen=true",))
    assert [(fault.step, fault.rank) for one in ran for fault, _, _ in one.met] == [(1, 0), (2, 1), (3, 1)]
    assert Fired(folder).has(name)
    code, out, _ = command(capsys, folder, "--json")
    assert code == 0 and len(json.loads(out)["happened"]) == 3 and json.loads(out)["waiting"] == []
    code, _, errors = command(capsys, folder, "kill rank=0 step=3")
    assert code == 2 and "the run has done 4 steps" in errors
    (folder / "job.toml").write_text(load_job(job).resolve().to_toml())
    code, _, errors = command(capsys, folder, "kill rank=0 step=3")
    assert code == 2 and "does not listen; start or resume it with --set fault.listen=true" in errors
    code, out, _ = command(capsys, "--kinds")
    assert code == 0 and all(kind in out for kind in KINDS)
