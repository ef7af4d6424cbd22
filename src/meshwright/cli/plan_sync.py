"""``meshwright plan --explain-sync``: one element of one worker's gradient, from its micro-batches to every copy.

Each data parallel rank stands for a power of two (rank 0: 1, rank 1: 2, rank 2: 4, ...), so that any partial sum
says who is in it. The messages are those of the very schedules that training carries out.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from meshwright.errors import InputError
from meshwright.job.grid import rank_of
from meshwright.job.job import Job
from meshwright.plan.place import LocalTensor, Place, StagePlace
from meshwright.plan.state import Division, division, packed, stage_groups
from meshwright.plan.sync_traffic import DIRECT
from meshwright.sync.follow import follow
from meshwright.sync.schedule import cut
from meshwright.sync.schedules import make_schedule


class Boundary(NamedTuple):
    """One boundary that the element crosses."""

    where: str
    what: str
    value: int
    """Of the element, where the contribution of dp rank d is 2^d; 0: it is no gradient any more."""
    weight: str
    """Of the loss of one token in it, where every token of the global batch is valid."""
    bytes: int
    """Of what crosses here: the element's buffer, or the message that carries it."""


class _Element(NamedTuple):
    """The element, and the buffer that its gradient travels in."""

    stage: StagePlace
    tensor: LocalTensor
    number: int
    buffer: str
    position: int
    """In one shard's part of the buffer."""
    shard: int
    """Whose part that is."""
    row: int
    """Elements of a part."""


def explain_sync(job: Job, rank: int, element: str | None) -> list[Boundary]:
    """The boundaries in order.

    Args:
        job: resolved; it sums gradients over its dp ranks in every step.
        rank: the worker, a global rank.
        element: ``name[index]`` of a parameter on that rank; absent: the middle of its first matrix.

    Raises:
        InputError: there is no such rank, parameter or element, or single elements are not what is sent.
    """
    if not 0 <= rank < job.layout.ranks:
        raise InputError(f"--rank: {rank} is not a rank of layout {job.layout}; use 0 to {job.layout.ranks - 1}")
    if job.sync.strategy != "all-reduce" or job.sync.compression != "none":
        key = "strategy" if job.sync.strategy != "all-reduce" else "compression"
        raise InputError(
            f"--explain-sync: sync.{key}={getattr(job.sync, key)} sends no single gradient elements; follow them with "
            f"--set sync.{key}={'all-reduce' if key == 'strategy' else 'none'}"
        )
    place = Place(job, rank)
    divided = division(job, place)
    return list(_Path(job, place, divided, _find(job, place, divided, element)).boundaries())


def _find(job: Job, place: Place, divided: Division, text: str | None) -> _Element:
    tensors = [(stage, tensor) for stage in place.stages for tensor in stage.tensors]
    if text is None:
        stage, tensor = next(one for one in tensors if one[1].decay and not one[1].embedding)
        index = tensor.count // 2
    else:
        found = re.fullmatch(r"(.+)\[(\d+)\]", text.strip())
        if found is None:
            raise InputError(f"--element: {text!r} is not of the form name[index], for example {tensors[0][1].name}[0]")
        names = {tensor.name: (stage, tensor) for stage, tensor in tensors}
        if found[1] not in names:
            few = ", ".join(list(names)[:6])
            raise InputError(f"--element: rank {place.rank} has no parameter {found[1]!r}; it has {few}, ...")
        (stage, tensor), index = names[found[1]], int(found[2])
        if index >= tensor.count:
            raise InputError(
                f"--element: {found[1]} has {tensor.count} elements on rank {place.rank}, not {index + 1}; "
                f"use 0 to {tensor.count - 1}"
            )
    if divided.grouped:
        return _in_group(stage, tensor, index, divided)
    return _in_bucket(job, place, stage, tensor, index, divided)


def _in_bucket(
    job: Job, place: Place, stage: StagePlace, tensor: LocalTensor, index: int, divided: Division
) -> _Element:
    limit = job.bucket_bytes // place.wide_bytes
    apart = place.spec.tied and job.layout.stage_count > 1
    all_buckets = list(packed(stage.tensors, limit, apart))
    for number, tensors in enumerate(all_buckets):
        if tensor in tensors:
            offset = sum(one.count for one in tensors[: tensors.index(tensor)]) + index
            filled = sum(one.count for one in tensors)
            row = -(-filled // divided.degree) * divided.degree // divided.shards
            text = f"bucket {number + 1} of {len(all_buckets)} of stage {stage.number}, element {offset:,}"
            return _Element(stage, tensor, index, text, offset % row, offset // row, row)
    raise AssertionError(tensor.name)


def _in_group(stage: StagePlace, tensor: LocalTensor, index: int, divided: Division) -> _Element:
    inside = tensor.layer is not None
    group = next(one for one in stage_groups(stage, divided) if (one.tensors is stage.block) == inside)
    # All layers have the same shapes: its counterpart in the first one stands at the same place.
    tensors = [one for one in stage.tensors if one.layer == tensor.layer] if inside else list(group.tensors)
    parts = [-(-one.shape[0] // divided.shards) * (one.count // one.shape[0]) for one in tensors]
    at = tensors.index(tensor)
    shard, within = divmod(index, parts[at])
    position = sum(parts[:at]) + within
    name = f"the group of layer {tensor.layer}" if inside else f"the group outside the layers of stage {stage.number}"
    return _Element(stage, tensor, index, f"{name}, row {shard}, element {position:,}", position, shard, group.row)


class _Path:
    def __init__(self, job: Job, place: Place, divided: Division, element: _Element) -> None:
        self.job, self.place, self.divided, self.element = job, place, divided, element
        self.width = place.wide_bytes
        self.worker = divided.copy * divided.shards + divided.shard
        tokens = job.batch.global_size * job.data.sequence_length
        self.weight = f"1/{tokens}"

    def boundaries(self) -> Iterator[Boundary]:
        """In the order in which they are crossed."""
        place, element, divided = self.place, self.element, self.divided
        name = f"{element.tensor.name}[{element.number}]"
        mine = frozenset({self.worker})
        whose = f"rank {place.rank} (dp {self.worker}, tp {place.coordinates.tp}, pp {place.coordinates.pp})"
        count = place.micro_batches
        many = f"{count} micro-batches" if count > 1 else "its one micro-batch"
        yield self._at(
            "worker", f"{whose}: backward of {many} of {place.rows} x {place.sequence} tokens gives {name}", mine,
            element.tensor.count * place.parameter_bytes,
        )  # fmt: skip
        size = element.row * divided.shards * self.width
        when = "after every micro-batch" if divided.grouped else "once, when all of it is there"
        sums = f", {count} added" if count > 1 and not divided.grouped else ""
        yield self._at("bucket", f"{element.buffer}{sums}; summed over dp {when}", mine, size)
        held = mine
        if divided.degree == 1:
            yield self._at("result", "one dp rank: nothing is exchanged", held, 0)
        if divided.shards > 1:
            held = yield from self._level("shard")
        if divided.copies > 1:
            held = yield from self._level(divided.copy_axis)
        yield from self._after(held)

    def _level(self, axis: str) -> Generator[Boundary, None, frozenset[int]]:
        job, divided, element = self.job, self.divided, self.element
        scatter = axis == "shard"
        ranks = divided.shards if scatter else divided.copies
        members = self._members(axis, ranks)
        own = divided.shard if scatter else divided.copy
        start = [frozenset({self._dp(axis, index)}) for index in range(ranks)]
        if not scatter and divided.shards > 1:
            start = [frozenset(range(copy * divided.shards, (copy + 1) * divided.shards)) for copy in range(ranks)]
        everybody = frozenset[int]().union(*start)
        name = "direct" if job.sync.algorithm in DIRECT else job.sync.algorithm
        what = "reduce-scatter" if scatter else "all-reduce"
        group = f"{what} over {axis}, ranks {_listed(members)}, by {name}"
        if name == "backend":
            size = element.row * self.width * (ranks if scatter else 1)
            yield self._at("group", f"{group}: handed to the transport whole", everybody, size)
            return everybody
        schedule = make_schedule("ordered" if name == "direct" else name, self._nodes(members))
        if scatter:
            rounds = [schedule.reduce_scatter(index, ranks, element.row) for index in range(ranks)]
            position = element.shard * element.row + element.position
        else:
            rows = self._padded_row()
            chunks = 1 if name == "direct" else -(-rows * self.width // job.sync.chunk_bytes)
            ranges = [cut(rows, chunks, index) for index in range(chunks)]
            first, last = next(one for one in ranges if one[0] <= element.position < one[1])
            rounds = [schedule.all_reduce(index, ranks, last - first) for index in range(ranks)]
            position = element.position - first
            if chunks > 1:
                group += f", chunk {ranges.index((first, last)) + 1} of {chunks}"
        hops, held = follow(rounds, position, start)
        carried = [hop for hop in hops if start[own] <= hop.carried]
        if not carried:
            text = f"{group}: stays on rank {members[own]}, which adds what the others send"
            yield self._at("group", text, held[own], element.row * self.width)
        for hop in carried:
            way = f"rank {members[hop.source]} to {members[hop.target]}"
            text = f"{group}: round {hop.round + 1} of {len(rounds[0])}, {way}"
            yield self._at("group", text, hop.carried, hop.elements * self.width)
        return held[element.shard if scatter else own]

    def _padded_row(self) -> int:
        """Elements that copies sum: of a group's accumulator, a multiple of the copies."""
        row, copies = self.element.row, self.divided.copies
        return -(-row // copies) * copies

    def _after(self, held: frozenset[int]) -> Iterator[Boundary]:
        job, divided, element, place = self.job, self.divided, self.element, self.place
        if element.tensor.tp_replicated and place.tp > 1:
            text = f"the parameter is whole on every tp rank: their {place.tp} parts are added, in rank order"
            yield self._at("result", text, held, element.row * self.width)
        owners = [rank for rank in range(divided.degree) if rank % divided.shards == element.shard]
        who = "every dp rank" if divided.shards == 1 else f"dp {_listed(owners)}"
        text = f"the sum of {len(held)} of {job.layout.dp} dp ranks; updated by {who}"
        yield self._at("result", text, held, self.width)
        if divided.shards > 1:
            when = "when next used" if divided.grouped else "after the update"
            part = element.row * place.parameter_bytes
            text = f"the new parameter: gathered over {divided.shards} shards {when}; this part of it by its owner"
            yield Boundary("result", text, 0, "", part)

    def _dp(self, axis: str, index: int) -> int:
        """The dp rank of the ``index``-th member of this worker's group."""
        if axis == "shard":
            return self.divided.copy * self.divided.shards + index
        return index * self.divided.shards + self.element.shard

    def _members(self, axis: str, ranks: int) -> list[int]:
        layout, where = self.job.layout, self.place.coordinates
        found = []
        for index in range(ranks):
            replicate, shard = divmod(self._dp(axis, index), layout.shard_degree)
            found.append(rank_of(layout, (where.pp, replicate, shard, where.tp)))
        return found

    def _nodes(self, members: Sequence[int]) -> list[int] | None:
        size = self.job.sync.node_size
        return None if size is None else [rank // size for rank in members]

    def _value(self, held: frozenset[int]) -> int:
        return sum(1 << rank for rank in held)

    def _at(self, where: str, what: str, held: frozenset[int], size: int) -> Boundary:
        return Boundary(where, what, self._value(held), self.weight, size)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def show_sync(console: Console, job: Job, rank: int, boundaries: Sequence[Boundary]) -> None:
    """As a table; repeated words of a group once."""
    console.print(
        f"{job.layout}: one element of the gradient of rank {rank}; dp rank d contributes 2^d, so that a value says "
        "who is in it",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("", "boundary", box=None, pad_edge=False)
    for name in ("value", "weight of a token", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for one in boundaries:
        head, _, tail = one.what.partition(": round ")
        shown = f"   round {tail}" if tail and head == before else one.what
        before = head
        table.add_row(one.where, shown, _number(one.value), one.weight, f"{one.bytes:,}")
    console.print(table)


def _number(value: int) -> str:
    """Small ones in full; of many ranks, how many are in it."""
    return "" if not value else str(value) if value < 1 << 16 else f"{value.bit_count()} ranks"
