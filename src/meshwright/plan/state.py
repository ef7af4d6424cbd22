"""Bytes of parameters, gradients and optimizer state on one rank, and how the data parallel ranks divide them.

With ``p`` bytes a parameter in forward and backward and ``w`` bytes in sums, masters and moments (4 for 16-bit
training, otherwise ``p``), over ``s`` shards and ``c`` copies of each:

                  parameters                          gradients      optimizer (AdamW)
    replicated    p n, 16-bit: + w n                  w n            2 w N
    ZeRO-1        p n, 16-bit: + w n / s              w n            2 w (N / s)
    ZeRO-2, 3     w G / s                             w G / s        2 w (N / s)

``N`` are the rank's elements, ``n`` those of its buckets (each padded to a multiple of s c elements), ``G`` those of
its groups (each tensor padded to a multiple of s rows). Where steps overlap (``schedule=2bw``) parameters and gradients
are there twice. ``N / s`` is exactly what is owned, no padding. What ZeRO-2
and 3 gather for forward and backward comes and goes within a step: temporary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from meshwright.job.job import Job
from meshwright.job.sections import OptimizerSection
from meshwright.job.validate_less_often import apart, momentum_in_compression, replica_ranks
from meshwright.plan.passes import passes_of
from meshwright.plan.place import LocalTensor, Place, StagePlace, is_sharded


@dataclass(frozen=True)
class Division:
    """How the dp ranks divide the state: rank ``(copy, shard)`` of ``copies x shards``."""

    shards: int
    copies: int
    shard: int
    """This rank's place among the shards."""
    copy: int
    """This rank's place among the copies of its shard."""
    copy_axis: str
    """The mesh axis along which the copies stand."""
    grouped: bool
    """ZeRO-2 and 3: tensors are cut by rows, in groups of a layer; otherwise flat buckets are cut."""
    every_step: bool
    """Deterministic mode: gradients are exchanged after every micro-step, and summed in a buffer of their own."""

    @property
    def degree(self) -> int:
        """All dp ranks."""
        return self.shards * self.copies


def division(job: Job, place: Place) -> Division:
    """The rank's part in the division of the state."""
    layout, where = job.layout, place.coordinates
    sharded = is_sharded(layout)
    shards = layout.shard_degree if sharded else 1
    if apart(job):
        return _of_replica(job, place, shards)
    return Division(
        shards=shards,
        copies=layout.dp // shards,
        shard=where.shard if sharded else 0,
        copy=where.replicate if sharded else where.replicate * layout.shard_degree + where.shard,
        copy_axis="replicate" if sharded else "dp",
        grouped=sharded and layout.zero >= 2,
        every_step=job.train.deterministic and layout.dp > 1,
    )


def _of_replica(job: Job, place: Place, shards: int) -> Division:
    """Where replicas train apart: the ranks of one of them."""
    where, ranks = place.coordinates, replica_ranks(job.layout)
    return Division(
        shards=shards,
        copies=ranks // shards,
        shard=where.shard if shards > 1 else 0,
        copy=where.shard if shards == 1 and ranks > 1 else 0,
        copy_axis="shard",
        grouped=shards > 1 and job.layout.zero >= 2,
        every_step=False,
    )


@dataclass(frozen=True)
class Range:
    """Consecutive elements of one tensor that the rank's optimizer updates as one."""

    tensor: LocalTensor
    count: int


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors in one flat buffer, last ones of the network first; cut in chunks and pieces by element."""

    tensors: tuple[LocalTensor, ...]
    division: Division
    times: int
    """How many alike the rank has."""

    @cached_property
    def filled(self) -> int:
        """Elements without padding."""
        return sum(tensor.count for tensor in self.tensors)

    @cached_property
    def size(self) -> int:
        """Elements, a multiple of the dp ranks."""
        return -(-self.filled // self.division.degree) * self.division.degree

    @property
    def chunk(self) -> int:
        """Elements this rank updates, padding included."""
        return self.size // self.division.shards

    @property
    def piece(self) -> int:
        """Elements this rank alone sums: its chunk, divided by the copies."""
        return self.size // self.division.degree

    @cached_property
    def owned(self) -> int:
        """Elements this rank updates."""
        return max(0, min(self.chunk, self.filled - self.division.shard * self.chunk))

    @property
    def shares(self) -> tuple[int, ...]:
        """Elements this rank updates."""
        return (self.owned,)

    def ranges(self) -> Iterator[Range]:
        """What the rank updates: its chunk, cut where tensors and where its piece begin and end."""
        start = self.division.shard * self.chunk
        mine = start + self.division.copy * self.piece
        cuts = (start, mine, mine + self.piece, start + self.chunk)
        first = 0
        for tensor in self.tensors:
            for low, high in pairwise(cuts):
                count = min(high, first + tensor.count) - max(low, first)
                if count > 0:
                    yield Range(tensor, count)
            first += tensor.count


@dataclass(frozen=True)
class Group:
    """The tensors of one layer, or those outside the layers of a stage: gathered together, each cut by rows."""

    tensors: tuple[LocalTensor, ...]
    division: Division
    times: int
    """How many alike the rank has: the layers of a stage are."""

    @cached_property
    def row(self) -> int:
        """Elements of one shard, padding included."""
        return sum(self._part(tensor) for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Elements of all shards."""
        return self.row * self.division.shards

    @property
    def piece(self) -> int:
        """Elements of the sum that this rank alone makes, padding included: 1 / copies of a row."""
        return -(-self.row // self.division.copies)

    @cached_property
    def owned(self) -> int:
        """Elements this rank updates."""
        return sum(self._mine(tensor) for tensor in self.tensors)

    @property
    def shares(self) -> tuple[int, ...]:
        """Elements this rank updates of each tensor."""
        return tuple(self._mine(tensor) for tensor in self.tensors)

    def ranges(self) -> Iterator[Range]:
        """What the rank updates: its rows of each tensor, in as many ranges as there are copies."""
        for tensor in self.tensors:
            mine = self._mine(tensor)
            step = -(-mine // self.division.copies)
            for start in range(0, mine, step or 1):
                yield Range(tensor, min(step, mine - start))

    def _part(self, tensor: LocalTensor) -> int:
        return -(-tensor.shape[0] // self.division.shards) * math.prod(tensor.shape[1:])

    def _mine(self, tensor: LocalTensor) -> int:
        part = self._part(tensor)
        return max(0, min(part, tensor.count - self.division.shard * part))


def buckets(job: Job, place: Place, divided: Division) -> list[Bucket]:
    """The flat buckets of all stages of a rank (replicated, ZeRO-1)."""
    limit = job.bucket_bytes // place.wide_bytes
    apart = place.spec.tied and job.layout.stage_count > 1
    return [
        Bucket(tensors, divided, times)
        for stage in place.stages
        for tensors, times in _distinct_buckets(stage, limit, apart)
    ]


@lru_cache(maxsize=4096)
def _distinct_buckets(stage: StagePlace, limit: int, apart: bool) -> list[tuple[tuple[LocalTensor, ...], int]]:
    """The buckets of a stage; those of the same shapes once, and how many they are."""
    alike: dict[object, list[tuple[LocalTensor, ...]]] = {}
    for tensors in packed(stage.tensors, limit, apart):
        key = tuple((tensor.shape, tensor.tp_replicated, tensor.embedding) for tensor in tensors)
        alike.setdefault(key, []).append(tensors)
    return [(same[0], len(same)) for same in alike.values()]


def packed(tensors: Sequence[LocalTensor], limit: int, apart: bool) -> Iterator[tuple[LocalTensor, ...]]:
    """From the last tensor to the first: as many as ``limit`` elements hold, or one that is larger.

    ``apart``: the copies of a tied embedding stand alone, so that the first and the last stage divide theirs alike.
    """
    collected: list[LocalTensor] = []
    filled = 0
    for tensor in reversed(tensors):
        if apart and tensor.embedding:
            yield (tensor,)
            continue
        if collected and filled + tensor.count > limit:
            yield tuple(collected)
            collected, filled = [], 0
        collected.append(tensor)
        filled += tensor.count
    if collected:
        yield tuple(collected)


def stage_groups(stage: StagePlace, divided: Division) -> list[Group]:
    """The groups of a stage (ZeRO-2, 3): one for each layer, and one for what stands outside, if anything does."""
    groups = [Group(stage.block, divided, len(stage.layers))] if stage.layers else []
    return groups + ([Group(stage.rest, divided, 1)] if stage.rest else [])


def groups(place: Place, divided: Division) -> list[Group]:
    """The groups of all stages of a rank (ZeRO-2, 3)."""
    return [group for stage in place.stages for group in stage_groups(stage, divided)]


def units(job: Job, place: Place) -> Sequence[Bucket | Group]:
    """What the rank's state is divided in: buckets, or groups."""
    divided = division(job, place)
    return groups(place, divided) if divided.grouped else buckets(job, place, divided)


def moments(optimizer: OptimizerSection) -> int:
    """Numbers the optimizer keeps for each element."""
    return 2 if optimizer.name == "adamw" else int(optimizer.momentum > 0)


@dataclass(frozen=True)
class Amount:
    """A part of a quantity, and the formula it came from, with its numbers."""

    quantity: str
    formula: str
    value: int


def parameter_bytes(job: Job, place: Place) -> list[Amount]:
    """Working copies and masters."""
    divided, p, w = division(job, place), place.parameter_bytes, place.wide_bytes
    if divided.grouped:
        rows = sum(group.row * group.times for group in groups(place, divided))
        text = f"{w} bytes x {rows:,} elements: 1/{divided.shards} of each tensor's rows, rounded up"
        return [Amount("masters and parameters", text, w * rows)]
    flat = buckets(job, place, divided)
    size, count = sum(bucket.size * bucket.times for bucket in flat), sum(bucket.times for bucket in flat)
    text = f"{p} bytes x {size:,} elements in {count} buckets, each padded to a multiple of {divided.degree}"
    amounts = [Amount("parameters", text, p * size)]
    if w > p:
        kept = sum(bucket.chunk * bucket.times for bucket in flat if bucket.owned)
        text = f"{w} bytes x {kept:,} elements: 1/{divided.shards} of each bucket"
        amounts.append(Amount("masters", text, w * kept))
    return _of_all_versions(job, amounts)


def _of_all_versions(job: Job, amounts: list[Amount]) -> list[Amount]:
    count = job.layout.versions
    if count == 1:
        return amounts
    return [Amount(one.quantity, f"{count} versions x {one.formula}", count * one.value) for one in amounts]


def gradient_bytes(job: Job, place: Place) -> list[Amount]:
    """The buffers in which gradients are summed."""
    divided, w, copies = division(job, place), place.wide_bytes, division(job, place).copies
    if divided.grouped:
        sums = sum(group.piece * copies * group.times for group in groups(place, divided))
        text = f"{w} bytes x {sums:,} elements: 1/{divided.shards} of each group, padded to a multiple of {copies}"
        return [Amount("gradient sums", text, w * sums), *_last_reductions(job, place, divided)]
    flat = buckets(job, place, divided)
    size, count = sum(bucket.size * bucket.times for bucket in flat), sum(bucket.times for bucket in flat)
    amounts = [Amount("gradients", f"{w} bytes x {size:,} elements in {count} buckets", w * size)]
    if divided.every_step:
        pieces = size // divided.degree
        text = f"{w} bytes x {pieces:,} elements: 1/{divided.degree} of each bucket, summed in order"
        amounts.append(Amount("sums in batch order", text, w * pieces))
    return _of_all_versions(job, amounts)


def _last_reductions(job: Job, place: Place, divided: Division) -> Iterator[Amount]:
    """What FSDP2 last reduced of a stage stays until the next step where the weight part of a backward pass ends it.

    Groups are reduced from the last to the first, so that is the first layer's.
    """
    for stage in place.stages:
        if passes_of(job, place, stage).ends_with_weights and (found := stage_groups(stage, divided)):
            text = f"stage {stage.number}: {place.wide_bytes} bytes x {found[0].size:,} elements of its first group"
            yield Amount("last reduction", text, place.wide_bytes * found[0].size)


def optimizer_bytes(job: Job, place: Place) -> list[Amount]:
    """The optimizer's moments; no padding."""
    from meshwright.plan.compressed import remembered_bytes, shared_bytes  # which knows buckets and groups

    kept, w = moments(job.optimizer), place.wide_bytes
    if momentum_in_compression(job) and job.optimizer.name == "sgd":
        kept = 0  # the compressor has the momentum
    found = []
    if kept:
        owned = sum(unit.owned * unit.times for unit in units(job, place))
        name = "first and second moments" if kept == 2 else "momentum"
        found.append(Amount(name, f"{kept} x {w} bytes x {owned:,} elements that this rank updates", kept * w * owned))
    if remembered := remembered_bytes(job, place):
        text = f"{remembered:,} bytes: what {job.sync.compression} has not sent, in two buffers"
        found.append(Amount("residuals", text, remembered))
    if shared := shared_bytes(job, place):
        found.append(Amount("shared model", f"{shared:,} bytes beside the replica's own", shared))
    return found


def state_bytes(job: Job, place: Place) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state."""
    parameters, gradients, optimizer = (
        sum(amount.value for amount in amounts(job, place))
        for amounts in (parameter_bytes, gradient_bytes, optimizer_bytes)
    )
    return parameters, gradients, optimizer


def shares(job: Job, place: Place) -> tuple[int, ...]:
    """Elements the rank updates, bucket by bucket or tensor by tensor: shards that share them are of one size."""
    return tuple(share for unit in units(job, place) for share in unit.shares)


LANES = 64
"""Elements a kernel takes at a time: what a range has beyond a multiple of them is copied to a row of its own."""


def lane_bytes(job: Job, place: Place) -> int:
    """Bytes of the rows in which the optimizer updates the ends of its ranges (temporary, there all the time).

    One row of ``LANES`` elements for the values, the gradients and each moment, for every owned range whose size is
    not a multiple of ``LANES``; each version of the parameters has its own.
    """
    tails = sum(unit.times for unit in units(job, place) for piece in unit.ranges() if piece.count % LANES)
    return job.layout.versions * (2 + moments(job.optimizer)) * LANES * tails * place.wide_bytes
