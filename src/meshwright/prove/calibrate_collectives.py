"""What the program's collectives take, by operation, group size, number of groups at once, and bytes.

They are called as the program calls them (``comm/collectives.py``, and its sends between pipeline stages), with some
computation between one and the next, as in a step: a rank that shares its core with others then also waits for its
turn. The time of the same loop without the collective is taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.comm.collectives import all_gather, all_gather_json, all_reduce, barrier, reduce_scatter
from meshwright.comm.shared_memory import close_channel, open_channel
from meshwright.job.cluster import Level
from meshwright.prove.stopwatch import Timing

SIZES = (64, 32 << 10, 192 << 10, 768 << 10, 4 << 20, 16 << 20)
"""Bytes of payload: around every point where an exchange changes its way."""
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send")
_LOOP_BYTES = 4 << 20
"""Payload of all calls between two looks at the clock, at most; four calls where they are small."""


@dataclass(frozen=True)
class Grouping:
    """Which ranks take part."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group, all at work at once; other ranks wait."""
    level: Level

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0])


@dataclass(frozen=True)
class CollectiveTime:
    """One operation in one grouping at one size."""

    operation: str
    size: int
    groups: int
    level: Level
    bytes: int
    timing: Timing


def groupings(world: int, per_node: int, largest: int = 8) -> list[Grouping]:
    """What is measured: inside a node every group size up to ``largest``, alone and as often as the node has room
    for; across nodes, one rank of each, and the whole world.
    """
    found = []
    local = min(world, per_node)
    for size in range(2, min(local, largest) + 1):
        for count in sorted({1, local // size}):
            groups = tuple(tuple(range(first * size, (first + 1) * size)) for first in range(count))
            found.append(Grouping(groups, "intra"))
    nodes = world // per_node if world > per_node else 1
    if nodes > 1:
        found.append(Grouping(tuple(tuple(range(rank, world, per_node)) for rank in range(per_node)), "inter"))
        if per_node > 1:
            found.append(Grouping((tuple(range(world)),), "inter"))
    return found


def measure_collectives(
    wanted: Sequence[Grouping], sizes: Sequence[int], seconds: float, device_type: str = "cpu"
) -> list[CollectiveTime]:
    """Time all of it; every rank of the default group must call it. The same result on every rank.

    Args:
        wanted: groupings, smallest first.
        sizes: bytes of payload.
        seconds: for all of it, about.
        device_type: ``cpu`` or ``cuda``.
    """
    world = dist.group.WORLD
    assert world is not None
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    result = []
    for grouping in wanted:
        mine = None
        for ranks in grouping.groups:
            group = dist.new_group(list(ranks), group_desc="meshwright calibration")
            if dist.get_rank() in ranks:
                mine = group
        if mine is not None and device.type == "cpu":
            open_channel(mine, all_gather_json)  # as a mesh does with its groups
        barrier(world)
        share = seconds / len(wanted)
        samples = {} if mine is None else _measure_group(mine, sizes, share, device)
        replies = [one for one in all_gather_json(samples, world) if one]
        result += [
            CollectiveTime(operation, grouping.size, len(grouping.groups), grouping.level, size, _slowest(replies, key))
            for operation in OPERATIONS
            for size in sizes
            if (key := f"{operation} {size}") in replies[0]
        ]
        if mine is not None:
            close_channel(mine)
            dist.destroy_process_group(mine)
    return result


def _slowest(replies: list[dict[str, list[float]]], key: str) -> Timing:
    """Round by round the rank that took longest; groups beside one another may have managed different numbers."""
    return Timing.of([max(one) for one in zip(*(reply[key] for reply in replies), strict=False)])


def _measure_group(
    group: dist.ProcessGroup, sizes: Sequence[int], seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """By operation and size: seconds of one call, round by round."""
    cases = {f"{name} {size}": _call(name, group, size, device) for name in OPERATIONS for size in sizes}
    work = _Between(device)
    samples: dict[str, list[float]] = {key: [] for key in cases}
    began, rounds = time.perf_counter(), 0
    while True:
        alone = _loop(group, work, None, 4, device)
        for key, call in cases.items():
            calls = max(1, min(4, _LOOP_BYTES // int(key.split()[1])))
            samples[key].append(max(0.0, _loop(group, work, call, calls, device) - alone))
        rounds += 1
        # Every rank must stop after the same round.
        more = torch.tensor([float(time.perf_counter() - began < seconds or rounds < 3)], device=device)
        all_reduce(more, group, op="max")
        if not more.item():
            return samples


class _Between:
    """What a rank computes between two collectives: about half a millisecond."""

    def __init__(self, device: torch.device) -> None:
        side = 256 if device.type == "cpu" else 2048
        self._a, self._b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)

    def __call__(self) -> None:
        torch.mm(self._a, self._b)


def _loop(
    group: dist.ProcessGroup,
    work: Callable[[], None],
    call: Callable[[], object] | None,
    calls: int,
    device: torch.device,
) -> float:
    """Seconds of one call, or of what is computed between two."""
    barrier(group)
    began = time.perf_counter()
    for _ in range(calls):
        work()
        if call is not None:
            call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def _call(name: str, group: dist.ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    """One operation of ``size`` bytes of payload."""
    degree = group.size()
    elements = max(degree, size // 4 // degree * degree)
    payload = torch.zeros(elements, device=device)
    if name == "all_reduce":
        return lambda: all_reduce(payload, group)
    if name == "all_gather":
        gathered = torch.empty(degree * elements, device=device)
        return lambda: all_gather(gathered, payload, group)
    if name == "reduce_scatter":
        kept = torch.empty(elements // degree, device=device)
        return lambda: reduce_scatter(kept, payload, group)
    return _ring_of_sends(group, payload)


def _ring_of_sends(group: dist.ProcessGroup, payload: torch.Tensor) -> Callable[[], object]:
    """Each rank sends to the next and receives from the one before, as neighbours in a pipeline do."""
    rank, degree = dist.get_rank(group), group.size()
    arrived = torch.empty_like(payload)

    def exchange() -> None:
        receive = dist.irecv(arrived, group=group, group_src=(rank - 1) % degree)
        sent = dist.isend(payload, group=group, group_dst=(rank + 1) % degree)
        for work in (receive, sent):
            if work is not None:
                work.wait()

    return exchange
