"""Starting local ranks: outcomes, signals, blame, and that nothing is left behind. Every case has a time bound."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.errors import InputError
from meshwright.recovery.launch import Launch, RanksFailed, last_lines
from meshwright.recovery.threads import threads_per_rank

FAKE = "tests.fault.launched_rank"
ROOT = Path(__file__).parents[2]
Begin = Callable[[str], tuple[subprocess.Popen[str], list[psutil.Process]]]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def within() -> Iterator[Callable[[float], None]]:
    """``within(20)``: the test from here on takes at most 20 seconds."""
    start = time.monotonic()
    limits: list[float] = []
    yield limits.append
    assert time.monotonic() - start < min(limits)


def start(directory: Path, behaviour: str, ranks: int = 2, **settings: object) -> Launch:
    return Launch(run_directory=directory, ranks=ranks, module=FAKE, arguments=[behaviour], **settings)  # type: ignore[arg-type]


def log_of(directory: Path, rank: int, attempt: int = 1) -> str:
    return (directory / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log").read_text()


def test_all_ranks_finish(tmp_path: Path, within: Callable[[float], None], capfd: pytest.CaptureFixture[str]) -> None:
    within(30)
    environment = dict(os.environ)
    handler = signal.getsignal(signal.SIGTERM)
    start(tmp_path, "finish", ranks=3).run()
    assert (tmp_path / "finished-2").read_text() == f"{threads_per_rank(3)} 127.0.0.1"
    assert capfd.readouterr().out == "hello from rank 0\n", "rank 0 alone writes to our standard output"
    assert log_of(tmp_path, 2) == "hello from rank 2\n"
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_attempt_keeps_the_first_one_s_logs(tmp_path: Path, within: Callable[[float], None]) -> None:
    within(40)
    start(tmp_path, "finish").run()
    start(tmp_path, "finish").run()
    assert log_of(tmp_path, 1, attempt=1) == log_of(tmp_path, 1, attempt=2) == "hello from rank 1\n"


def test_abort_after_reported_completion_is_no_failure(tmp_path: Path, within: Callable[[float], None]) -> None:
    within(30)
    start(tmp_path, "abort-after-done").run()


def test_exception_is_shown_as_one_block(tmp_path: Path, within: Callable[[float], None]) -> None:
    within(30)
    with pytest.raises(RanksFailed) as raised:
        start(tmp_path, "raise", ranks=3).run()
    block = str(raised.value)
    assert block.startswith("rank 1 of 3 failed: exit code 1, ZeroDivisionError: one by none\n")
    assert "  | about to divide\n" in block
    assert '  | ZeroDivisionError: one by none\n' in block
    assert "after it: rank 0 (killed by SIGTERM), rank 2 (killed by SIGTERM)" in block
    assert raised.value.exit_code == 1


def test_exit_zero_before_the_end_is_a_failure(tmp_path: Path, within: Callable[[float], None]) -> None:
    within(45)
    with pytest.raises(RanksFailed, match=r"rank 1 of 2 failed: exit code 0, before its work was done"):
        start(tmp_path, "exit-zero").run()


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("collective-raise", "rank 1 of 3 failed: exit code 1, ValueError: loss is NaN at step 3"),
        ("collective-kill", "rank 1 of 3 failed: killed by SIGKILL"),
    ],
)
def test_the_cause_is_named_not_its_consequences(
    tmp_path: Path, within: Callable[[float], None], behaviour: str, said: str
) -> None:
    within(60)
    with pytest.raises(RanksFailed) as raised:
        start(tmp_path, behaviour, ranks=3).run()
    assert str(raised.value).startswith(said)


def test_a_refusal_keeps_its_sentence_and_exit_code(tmp_path: Path, within: Callable[[float], None]) -> None:
    within(30)
    with pytest.raises(InputError) as raised:
        start(tmp_path, "refuse").run()
    assert str(raised.value) == "layout: tp=3 does not divide 8 heads; use 1, 2, 4 or 8"
    assert raised.value.exit_code == 2


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port} on 127.0.0.1 cannot be used"):
            start(tmp_path, "finish", port=port).run()
    assert not (tmp_path / "logs").exists(), "refused before anything was started"


def test_last_lines_of_a_binary_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff" * 70000 + b"\none\n\n  \ntwo\xfe\n")
    assert last_lines(path, 2) == ["one", "two\N{REPLACEMENT CHARACTER}"]
    assert last_lines(tmp_path / "none", 2) == []


LAUNCHER = """
import sys
from pathlib import Path
from meshwright.errors import MeshwrightError
from meshwright.recovery.launch import Launch
try:
    directory, module, behaviour = sys.argv[1:]
    Launch(run_directory=Path(directory), ranks=2, module=module, arguments=[behaviour], grace_seconds=20).run()
except MeshwrightError as error:
    print(type(error).__name__, error, sep=": ")
    sys.exit(error.exit_code)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Begin]:
    """A launcher in its own process, once its two ranks are at work, and those ranks."""
    running: list[subprocess.Popen[str]] = []

    def begin(behaviour: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        command = [sys.executable, "-c", LAUNCHER, str(tmp_path), FAKE, behaviour]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        running.append(process)
        deadline = time.monotonic() + 40
        marks = [tmp_path / f"started-{rank}" for rank in range(2)]
        while not all(mark.exists() and mark.read_text() for mark in marks):
            assert process.poll() is None and time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        return process, [psutil.Process(int(mark.read_text())) for mark in marks]

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def all_gone(processes: list[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_the_ranks_save(
    tmp_path: Path, launcher: Begin, number: signal.Signals
) -> None:
    process, ranks = launcher("train")
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=15)
    assert time.monotonic() - began < 10
    assert output == f"TrainingStopped: stopped by {number.name} at step 7, saved\n"
    assert process.returncode == 1
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == [f"[{int(number)}]"] * 2
    assert all_gone(ranks, 1)


def test_a_second_signal_does_not_wait_for_the_save(
    tmp_path: Path, launcher: Begin
) -> None:
    process, ranks = launcher("train-slow-save")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None, "the first signal waits for the ranks"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=15)
    assert time.monotonic() - began < 5
    assert output.startswith("TrainingStopped: stopped by SIGINT; rank 0, 1 of 2 ended without saving")
    assert not (tmp_path / "saved-0").exists()
    assert all_gone(ranks, 1)


def test_kill_9_of_the_launcher_leaves_no_rank(
    launcher: Begin,
) -> None:
    process, ranks = launcher("train")
    process.kill()
    process.wait()
    assert all_gone(ranks, 10), "ranks outlived their launcher"
