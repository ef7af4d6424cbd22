"""Where a rank is, written and read back."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from meshwright.comm import position
from meshwright.comm.phase import phase


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, position.SIZE) as made:
        position.attach(made, process=7)
        yield made
        position.attach(None)


DP = SimpleNamespace(group_name="dp-group")


def test_nobody_reads_nothing_is_written() -> None:
    assert position.started(DP) == 0
    with position.waiting(DP, "all_reduce"):
        position.in_phase("forward")
    position.begin_step(3)


def test_a_position_is_read_back(memory: mmap.mmap) -> None:
    position.name_group("dp-group", "dp", [0, 2])
    position.begin_step(3)
    with phase("backward"):
        position.in_micro_batch(2)
        number = position.started(DP)
        with position.waiting(DP, "reduce_scatter", number):
            seen = position.read(memory)
    assert (seen.process, seen.step, seen.phase, seen.micro_batch) == (7, 3, "backward", 2)
    assert (seen.waiting, seen.operation, seen.sequence, seen.axis, seen.members) == (
        True, "reduce_scatter", 1, "dp", (0, 2),
    )  # fmt: skip
    assert seen.started_in((0, 2), "dp") == 1 and seen.started_in((0, 1), "dp") is None
    after = position.read(memory)
    assert not after.waiting and after.phase == "none" and after.beats > seen.beats and after.changed >= seen.changed


def test_what_it_waited_in_stays_after_an_error(memory: mmap.mmap) -> None:
    position.name_group("dp-group", "dp", [0, 1])
    with pytest.raises(RuntimeError, match="gone"), position.waiting(DP, "all_gather"):
        raise RuntimeError("gone")
    assert position.read(memory).waiting and position.read(memory).operation == "all_gather"


def test_own_time_is_without_waiting(memory: mmap.mmap) -> None:
    position.begin_own_time()
    position.begin_step(1)
    with position.waiting(DP, "barrier"):
        threading.Event().wait(0.2)
    position.finish_step(1)
    seen = position.read(memory)
    assert seen.finished == 1 and 0.0 < seen.own_seconds < 0.15


def test_another_thread_does_not_say_that_the_rank_waits(memory: mmap.mmap) -> None:
    found = []

    def wait() -> None:
        with position.waiting(DP, "gather"):
            found.append(position.read(memory).waiting)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_state_that_is_being_changed(memory: mmap.mmap) -> None:
    position.holds_state(-1)
    assert position.read(memory).state_step == -1
    position.holds_state(4)
    assert position.read(memory).state_step == 4
    position.write_port(memory, 4711)
    assert position.read(memory).port == 4711
