"""Messages through shared memory: the same results as by transport, in any order of waiting, and no hang on a death."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_collectives import exact_everywhere, random_inputs, rank_order_sum

from meshwright.comm import shared_memory
from meshwright.comm.collectives import Handle, all_gather, all_gather_json, reduce_scatter
from meshwright.comm.mesh import Mesh
from meshwright.comm.shared_memory import PeerLost, channel_of, close_channel, open_channel
from meshwright.comm.traffic import Traffic, activate
from meshwright.job.layout import Layout
from meshwright.prove.pool import RankFailure, RankPool

Ranks = Callable[[int], RankPool]


def through_memory(function: Callable[..., object], *arguments: object) -> object:
    """Run ``function`` while all ranks share memory in the default group."""
    group = dist.group.WORLD
    assert group is not None
    open_channel(group, all_gather_json)
    try:
        assert channel_of(group) is not None
        return function(*arguments)
    finally:
        close_channel(group)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_and_copies_are_exact(ranks: Ranks, size: int) -> None:
    ranks(size).run(through_memory, exact_everywhere, (torch.float32, torch.bfloat16, torch.int64))


def many_under_way(seed: int) -> int:
    """Start operations of all sizes, wait for them in another order on every rank; bytes of memory touched."""
    group, degree, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    assert group is not None
    shared, own = random.Random(seed), random.Random(seed + rank)
    started: list[tuple[Handle, torch.Tensor, torch.Tensor]] = []
    for _ in range(120):
        length = shared.choice([1, 7, 1000, 65_536, 200_001])
        whole = random_inputs(degree * length)
        if shared.random() < 0.5:
            output = torch.empty(length)
            handle = reduce_scatter(output, whole[rank], group, ordered=True, asynchronous=True)
            expected = rank_order_sum([part[rank * length : (rank + 1) * length] for part in whole])
        else:
            output = torch.empty(degree * length)
            handle = all_gather(output, whole[rank][:length].clone(), group, asynchronous=True)
            expected = torch.cat([part[:length] for part in whole])
        assert handle is not None
        started.append((handle, output, expected))
        while len(started) > 9 or (started and own.random() < 0.3):
            handle, output, expected = started.pop(own.randrange(len(started)))
            handle.wait()
            assert torch.equal(output, expected)
    for handle, output, expected in started:
        handle.wait()
        assert torch.equal(output, expected)
    channel = channel_of(group)
    assert channel is not None
    # Messages start at offset 0 of the data again and again; a page that was never written reads as zero.
    used = channel._mine.data[: 256 * 2**20]
    return int(used.nonzero()[0].max(initial=0))


def test_any_order_of_waiting_and_memory_is_used_again(ranks: Ranks) -> None:
    (first, *_) = ranks(2).run(through_memory, many_under_way, 5)
    total = 120 * 2 * 50_000 * 4
    assert 0 < first < total / 2, "every message took new memory"


def counts() -> tuple[object, ...]:
    """What the ledger's books say of one reduce-scatter and one all-gather."""
    with Mesh(Layout(dp=dist.get_world_size())) as mesh:
        group = mesh.group("dp")
        assert channel_of(group) is not None, "a mesh shares memory between ranks of one host"
        traffic = Traffic(mesh.axis_of, "gloo")
        activate(traffic)
        whole = torch.ones(200_000)
        mine = torch.empty(whole.numel() // group.size())
        reduce_scatter(mine, whole, group)
        all_gather(whole, mine, group)
        activate(None)
        kept = channel_of(group)
    assert kept is not None and channel_of(group) is None
    return tuple(tuple(send.model_dump().items()) for send in traffic.sends())


def test_the_books_are_those_of_the_transport(ranks: Ranks) -> None:
    payload = 200_000 * 4
    for rows in ranks(4).run(counts):
        gathered, scattered = map(dict, rows)
        assert (gathered["operation"], scattered["operation"]) == ("all_gather", "reduce_scatter")
        assert (gathered["payload"], gathered["wire"]) == (payload // 4, payload // 4 * 3)
        assert (scattered["payload"], scattered["wire"]) == (payload, payload // 4 * 3)


def elsewhere(what: str) -> bool:
    """Rank 1 pretends to be on another host, or on a machine without such memory."""
    group = dist.group.WORLD
    assert group is not None
    before = shared_memory._host, shared_memory._possible
    if dist.get_rank() == 1 and what == "host":
        shared_memory._host = lambda: "another"
    if dist.get_rank() == 1 and what == "machine":
        shared_memory._possible = lambda group: False
    try:
        open_channel(group, all_gather_json)
    finally:
        shared_memory._host, shared_memory._possible = before
    return channel_of(group) is None


@pytest.mark.parametrize("what", ["host", "machine"])
def test_nobody_shares_unless_all_can(ranks: Ranks, what: str) -> None:
    assert ranks(2).run(elsewhere, what) == [True, True]


def wait_for_the_lost(end: str, said: Path) -> None:
    """Rank 1 dies or comes too late; rank 0 notes what it is told."""
    group = dist.group.WORLD
    assert group is not None
    open_channel(group, all_gather_json, timedelta(seconds=2))
    if dist.get_rank() == 1:
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(6)
        return
    try:
        reduce_scatter(torch.empty(8), torch.ones(16), group)
    except PeerLost as lost:
        said.write_text(str(lost), encoding="utf-8")


@pytest.mark.parametrize(("end", "sentence"), [("killed", "has ended"), ("late", "sent nothing for")])
def test_a_lost_peer_is_named_in_time(tmp_path: Path, end: str, sentence: str) -> None:
    said, pool = tmp_path / "said", RankPool(2)
    try:
        with suppress(RankFailure):  # a killed rank fails the pool, which leaves the others 3 seconds
            pool.run(wait_for_the_lost, end, said, timeout=60.0)
    finally:
        pool.close()
    assert "rank 1 of its group of 2" in said.read_text() and sentence in said.read_text()
