"""Traffic of gradient sums by an algorithm of the job's choice (``sync.algorithm``).

Shards sum by one reduce-scatter of a bucket or group, copies by one all-reduce of what a shard keeps. The payload is
the same in every algorithm; what a rank puts on its link is ``sync_wire``'s closed form for its place in the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.job.grid import rank_of
from meshwright.job.job import Job
from meshwright.plan import sync_wire
from meshwright.plan.place import Place
from meshwright.plan.sent import Sent
from meshwright.plan.state import Division
from meshwright.plan.wire import Backend, Wired

DIRECT = ("auto", "direct")
"""``sync.algorithm`` whose sums are the direct exchanges of ``traffic``."""


def algorithm_sums(
    job: Job, place: Place, divided: Division, sizes: Iterable[tuple[int, int]], backend: Backend,
    micro_batches: int = 1,
) -> Iterator[Sent]:  # fmt: skip
    """The sums of a rank's gradients in a step.

    Args:
        job: its algorithm is none of ``DIRECT``.
        place: the rank's.
        divided: how the dp ranks divide the state.
        sizes: by kind of buffer: elements of one shard's part of it, and how many alike there are.
        backend: whose collectives ``backend`` are.
        micro_batches: after each of which the shards sum; copies do so once a step.
    """
    w, name, sizes = place.wide_bytes, job.sync.algorithm, list(sizes)
    if divided.shards > 1:
        members = _members(job, place, divided, "shard")
        for row, times in sizes:
            count, payload = times * micro_batches, w * row * divided.shards
            wired = _scatter_wire(job, members, divided.shard, row, w, backend)
            text = f"{w} bytes x {row * divided.shards:,} elements x {count}, summed by {name}"
            yield Sent("shard", "reduce_scatter", "reduce", count * payload, wired.times(count), count, text)
    if divided.copies > 1:
        members = _members(job, place, divided, divided.copy_axis)
        for row, times in sizes:
            wired = _reduce_wire(job, members, divided.copy, row, w)
            text = f"{w} bytes x {row:,} elements x {times}, across {divided.copies} copies by {name}"
            yield Sent(divided.copy_axis, "all_reduce", "reduce", times * w * row, wired.times(times), times, text)


def _members(job: Job, place: Place, divided: Division, axis: str) -> list[int]:
    """The global ranks of this rank's group."""
    layout, where = job.layout, place.coordinates
    if axis == "shard":
        return [rank_of(layout, (where.pp, where.replicate, shard, where.tp)) for shard in range(divided.shards)]
    if axis == "replicate":
        return [rank_of(layout, (where.pp, copy, where.shard, where.tp)) for copy in range(divided.copies)]
    shards = layout.shard_degree
    return [rank_of(layout, (where.pp, dp // shards, dp % shards, where.tp)) for dp in range(layout.dp)]


def _nodes(job: Job, members: list[int]) -> list[int]:
    size = job.sync.node_size
    return [0 if size is None else rank // size for rank in members]


def _scatter_wire(job: Job, members: list[int], index: int, row: int, width: int, backend: Backend) -> Wired:
    name, ranks = job.sync.algorithm, len(members)
    if name == "backend":
        factor = 2 if backend == "gloo" else 1
        return Wired(factor * (ranks - 1) * row * width, f"{factor} x {ranks - 1}/{ranks} of the payload")
    load = sync_wire.reduce_scatter(name, index, ranks, row, _nodes(job, members))
    return Wired(load.elements * width, f"{name}: {load.messages} messages of {load.elements:,} elements in all")


def _reduce_wire(job: Job, members: list[int], index: int, elements: int, width: int) -> Wired:
    name, ranks, payload = job.sync.algorithm, len(members), elements * width
    if name == "backend":
        return Wired(2 * (ranks - 1) * payload // ranks, f"2 x {ranks - 1}/{ranks} of the payload")
    chunks = -(-payload // job.sync.chunk_bytes)
    load = sync_wire.all_reduce(name, index, ranks, elements, _nodes(job, members), chunks)
    text = f"{name}: {load.messages} messages of {load.elements:,} elements in all, in {chunks} chunks"
    return Wired(load.elements * width, text)
