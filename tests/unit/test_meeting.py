"""Ranks meet in a store that is older than they are: with those who live, and with nothing of those before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from meshwright.recovery import meeting
from meshwright.recovery.meeting import NotAllCame, meet

Come = Callable[..., "Future[Store]"]
LONG = timedelta(seconds=30)


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=LONG, wait_for_workers=False)


@pytest.fixture
def come(server: TCPStore) -> Iterator[Come]:
    """A rank comes, over a connection of its own; what it agrees on."""
    with ThreadPoolExecutor(8) as threads:

        def one(rank: int, size: int, timeout: timedelta = LONG) -> Future[Store]:
            store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=LONG, wait_for_workers=False)
            return threads.submit(meet, store, rank, size, timeout)

        yield one


def test_each_attempt_has_a_store_of_its_own(come: Come) -> None:
    for attempt in range(3):
        stores = [one.result(20) for one in [come(rank, 3) for rank in (2, 0, 1)]]
        assert not any(store.check(["address"]) for store in stores), "left by the attempt before"
        stores[0].set("address", str(attempt))
        assert [store.get("address") for store in stores] == [str(attempt).encode()] * 3


def test_one_rank_is_a_world(come: Come) -> None:
    come(0, 1).result(20)


def test_who_died_after_it_came_is_not_waited_for_again(
    come: Come, server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 0.5)
    leader = come(0, 2)
    dead = meeting._Meeting(server, 1, 2, time.monotonic(), LONG, time.monotonic)
    while not (number := server.add("meshwright/round", 0)):
        time.sleep(0.01)
    server.set(f"meshwright/round/{number}/here/1", dead.token)
    server.wait([f"meshwright/round/{number}/called"], LONG)  # by its token, and it does not answer
    stores = [one.result(20) for one in (leader, come(1, 2))]
    stores[0].set("here", "")
    assert stores[1].check(["here"]) and server.add("meshwright/round", 0) > number


def test_who_waits_for_a_dead_leader_goes_with_the_next(come: Come, server: TCPStore) -> None:
    server.add("meshwright/round", 1)  # opened by a rank 0 that is gone
    waiting = come(1, 2)
    server.wait(["meshwright/round/1/here/1"], LONG)
    stores = [come(0, 2).result(20), waiting.result(20)]
    stores[1].set("here", "")
    assert stores[0].check(["here"])


def test_who_did_not_come_is_named(come: Come) -> None:
    some = come(1, 4)
    with pytest.raises(NotAllCame, match=r"rank 0 of 4 waited 1 s .* for ranks 2, 3 to start; nothing was changed"):
        come(0, 4, timedelta(seconds=1)).result(20)
    with pytest.raises(NotAllCame, match=r"rank 1 of 2 waited 1 s .* for rank 0 and the others to start"):
        come(1, 2, timedelta(seconds=1)).result(20)
    for late in (0, 2, 3):
        come(late, 4)
    some.result(20)
