"""A tiny worker for the launch tests: `python -m tests.fault.launched_rank RUN_DIRECTORY BEHAVIOUR`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from meshwright.errors import InputError, TrainingStopped
from meshwright.recovery.rank import RECORDS_VARIABLE, RankRecord, run_as_rank

DIRECTORY, BEHAVIOUR = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ.get("RANK", "0"))


def note(name: str, text: str = "") -> None:
    (DIRECTORY / f"{name}-{RANK}").write_text(text)


def train_until_told(save_seconds: float) -> None:
    """Step for at most a minute; on a signal save and stop, as training does."""
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: told.append(received))
    note("started", str(os.getpid()))
    deadline = time.monotonic() + 60
    while not told and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(save_seconds)
    note("saved", str(told))
    raise TrainingStopped(f"stopped by {signal.Signals(told[0]).name} at step 7, saved")


def collective() -> None:
    """Real collectives, in which rank 1 dies and the others are left waiting."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(1000):
        if RANK == 1 and step == 3:
            if BEHAVIOUR == "collective-raise":
                raise ValueError("loss is NaN at step 3")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(10))


def work() -> None:
    match BEHAVIOUR:
        case "finish":
            print(f"hello from rank {RANK}")
            note("finished", os.environ["OMP_NUM_THREADS"] + " " + os.environ["MASTER_ADDR"])
        case "raise" if RANK == 1:
            print("about to divide")
            raise ZeroDivisionError("one by none")
        case "raise" if RANK != 1:
            time.sleep(20)  # until the launcher ends it
        case "exit-zero" if RANK != 1:
            time.sleep(2)
        case "exit-zero":
            os._exit(0)
        case "refuse":
            raise InputError("layout: tp=3 does not divide 8 heads; use 1, 2, 4 or 8")
        case "train":
            train_until_told(0.2)
        case "train-slow-save":
            train_until_told(30)
        case "collective-raise" | "collective-kill":
            collective()


def abort_once_all_are_done(_code: int) -> None:
    """As the transport's static destructors do now and then, after the ranks' last barrier."""
    deadline = time.monotonic() + 20
    folder = Path(os.environ[RECORDS_VARIABLE])
    while time.monotonic() < deadline:
        records = [RankRecord.read(folder, rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
        if all(record is not None and record.state == "done" for record in records):
            break
        time.sleep(0.02)
    os.abort()


if __name__ == "__main__":
    if BEHAVIOUR == "abort-after-done":
        os._exit = abort_once_all_are_done  # type: ignore[assignment]
    run_as_rank(work)
