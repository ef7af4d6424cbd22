"""Compressed gradient sums and meetings of replicas, in closed form: payload, bytes on the link, bytes remembered.

A buffer of n elements, summed over P ranks, w bytes in the wide type, ``C(n)`` bytes of n elements encoded:

    C(n)    fp16, bf16  2 n          int8, fp8  n + w ceil(n / block)
            sign  ceil(n / 8) + w ceil(n / block)          qsgd  ceil(bits n / 8) + w ceil(n / block)

    two stages (those, and 1-bit Adam by its signs)     all-to-all of P C(n/P); all-gather of C(n/P) where all ranks
                                                        need the sum (a sum over shards stops after the first)
    dgc                 all-gather of (4 + w) ceil((1 - sparsity) n)
    powersgd            all-reduce of w times every P and all that travels whole; all-reduce of w times every Q

``compression_level = "slow"`` leaves the sum over shards whole; with replicated state a node's ranks are the shards of
a bucket (axes ``intra`` and ``inter``), and what they summed is gathered whole.

Remembered, in two buffers each: n elements a sum, n/P more for the way back, n for a velocity or momentum, and every Q.
A step after all warm-ups is meant, and with replicas that train apart one in which they meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.job.job import Job
from meshwright.job.nodes import compressed_node_size, node_degree
from meshwright.job.sync_keys import MOMENTUM_ONLY
from meshwright.job.validate_less_often import apart, momentum_in_compression, replica_count
from meshwright.plan import wire
from meshwright.plan.place import Place
from meshwright.plan.sent import Sent
from meshwright.plan.state import Bucket, Division, Group, division, groups, packed, units
from meshwright.plan.wire import Backend

_INDEX_BYTES, _COUNT_BYTES = 4, 8


def compresses(job: Job) -> bool:
    """Whether gradients travel compressed."""
    return job.sync.compression != "none" and not apart(job)


@dataclass(frozen=True)
class _Sum:
    """One kind of sum over buffers."""

    level: str
    """"shard" or "copy"."""
    axis: str
    size: int
    """Elements of a buffer."""
    ranks: int
    shapes: tuple[tuple[int, ...], ...]
    """Of the parameters in it."""
    times: int
    """Buffers alike."""
    calls: int
    """Sums of each in a step."""
    gathered: bool = False
    """Every rank needs the rows of all, which travel whole."""


def _sums(job: Job, place: Place) -> Iterator[_Sum]:
    divided, node_size = division(job, place), compressed_node_size(job)
    for unit in units(job, place):
        if node_size is not None and isinstance(unit, Bucket):
            yield from _sums_by_node(unit, node_degree(job.layout, node_size) or 1)
        else:
            yield from _sums_of(unit, divided, place.micro_batches)


def _sums_by_node(unit: Bucket, inside: int) -> Iterator[_Sum]:
    shapes, nodes = tuple(tensor.shape for tensor in unit.tensors), unit.division.copies // inside
    yield _Sum("shard", "intra", unit.size, inside, shapes, unit.times, 1, gathered=True)
    yield _Sum("copy", "inter", unit.size // inside, nodes, shapes, unit.times, 1)


def _sums_of(unit: Bucket | Group, divided: Division, micro_batches: int) -> Iterator[_Sum]:
    shards, copies = divided.shards, divided.copies
    if isinstance(unit, Group):
        row = tuple((-(-tensor.shape[0] // shards), *tensor.shape[1:]) for tensor in unit.tensors)
        if shards > 1:
            yield _Sum("shard", "shard", unit.size, shards, row * shards, unit.times, micro_batches)
        if copies > 1:
            yield _Sum("copy", divided.copy_axis, unit.piece * copies, copies, row, unit.times, 1)
        return
    shapes = tuple(tensor.shape for tensor in unit.tensors)
    if shards > 1:
        yield _Sum("shard", "shard", unit.size, shards, shapes, unit.times, 1)
    if copies > 1:
        yield _Sum("copy", divided.copy_axis, unit.chunk, copies, shapes, unit.times, 1)


def encoded(job: Job, count: int, wide: int) -> int:
    """Bytes of ``count`` elements in the job's codec."""
    kind, scales = job.sync.compression, wide * -(-count // job.sync.compression_block)
    match kind:
        case "fp16" | "bf16":
            return 2 * count
        case "int8" | "fp8":
            return count + scales
        case "qsgd":
            return -(-count * job.sync.compression_bits // 8) + scales
        case _:
            return -(-count // 8) + scales


def kept(size: int, sparsity: float) -> int:
    """Elements that travel of a buffer of ``size``."""
    return min(size, max(1, math.ceil(round((1.0 - sparsity) * size, 6))))


@dataclass(frozen=True)
class _Factors:
    """Numbers of a buffer's two all-reduces."""

    first: int
    second: int
    matrices: int


def _factors(job: Job, each: _Sum) -> _Factors:
    rank, saving = job.sync.compression_rank, job.sync.compression_least_saving
    first, second, matrices = each.size, 0, 0
    for shape in each.shapes:
        if len(shape) != 2:
            continue
        a, b = shape
        r = min(rank, a, b)
        if (a + b) * r * saving <= a * b:
            first, second, matrices = first - a * b + a * r, second + b * r, matrices + 1
    return _Factors(first, second, matrices)


def compressed_sums(job: Job, place: Place, backend: Backend) -> Iterator[Sent]:
    """The sums of a rank's gradients in a step."""
    w = place.wide_bytes
    for each in _sums(job, place):
        if job.sync.compression_level == "slow" and each.level == "shard":
            yield from _plain_sum(each, w)
            continue
        match job.sync.compression:
            case "dgc":
                yield from _sparse(job, each, w)
            case "powersgd":
                yield from _low_rank(job, place, each, w, backend)
            case _:
                yield from _two_stages(job, each, w)


def _plain_sum(each: _Sum, w: int) -> Iterator[Sent]:
    count, payload = each.times * each.calls, w * each.size
    wired = wire.reduce_scatter(payload, each.ranks).times(count)
    text = f"{w} bytes x {each.size:,} elements x {count}, not compressed"
    yield Sent(each.axis, "reduce_scatter", "reduce", count * payload, wired, count, text)
    if each.gathered:
        row = each.size // each.ranks
        wired = wire.all_gather(w * row, each.ranks).times(count)
        text = f"{w} bytes x {row:,} elements x {count}: this rank's piece of the sum, not compressed"
        yield Sent(each.axis, "all_gather", "reduce", count * w * row, wired, count, text)


def _two_stages(job: Job, each: _Sum, w: int) -> Iterator[Sent]:
    count, row = each.times * each.calls, each.size // each.ranks
    small, kind = encoded(job, row, w), job.sync.compression
    payload = each.ranks * small
    text = f"{kind}: {each.ranks} rows of {row:,} elements in {small:,} bytes x {count}"
    wired = wire.reduce_scatter(payload, each.ranks).times(count)
    yield Sent(each.axis, "all_to_all", "reduce", count * payload, wired, count, text)
    if each.level == "copy":
        text = f"{kind}: the sum of a row, {row:,} elements in {small:,} bytes x {count}"
        wired = wire.all_gather(small, each.ranks).times(count)
        yield Sent(each.axis, "all_gather", "reduce", count * small, wired, count, text)


def _sparse(job: Job, each: _Sum, w: int) -> Iterator[Sent]:
    count, chosen = each.times * each.calls, kept(each.size, job.sync.compression_sparsity)
    payload = (_INDEX_BYTES + w) * chosen
    text = f"dgc: {_INDEX_BYTES} + {w} bytes x {chosen:,} of {each.size:,} elements x {count}"
    wired = wire.all_gather(payload, each.ranks).times(count)
    yield Sent(each.axis, "all_gather", "reduce", count * payload, wired, count, text)


def _low_rank(job: Job, place: Place, each: _Sum, w: int, backend: Backend) -> Iterator[Sent]:
    found, count, where = _factors(job, each), each.times * each.calls, division(job, place)
    index = where.shard if each.level == "shard" else where.copy
    for numbers, name in ((found.first, "every P and what is whole"), (found.second, "every Q")):
        if numbers:
            wired = wire.all_reduce(numbers, w, each.ranks, backend, index=index, ordered=True).times(count)
            text = f"powersgd: {w} bytes x {numbers:,}, {name}, x {count}"
            yield Sent(each.axis, "all_reduce", "reduce", count * numbers * w, wired, count, text)


def remembered_bytes(job: Job, place: Place) -> int:
    """Bytes of residuals, velocities, momenta and bases, both buffers of each."""
    if not compresses(job):
        return 0
    elements, kind = 0, job.sync.compression
    two_level = False
    for each in _sums(job, place):
        if each.level == "shard":
            if job.sync.compression_level == "slow":
                continue
            two_level = True
        elements += each.times * _remembered(job, each, again=two_level and each.level == "copy", kind=kind)
    return 2 * place.wide_bytes * elements


def _remembered(job: Job, each: _Sum, *, again: bool, kind: str) -> int:
    back = each.size // each.ranks if each.level == "copy" else 0
    if kind == "qsgd":
        return 0
    if kind == "powersgd":
        return each.size + _factors(job, each).second
    if kind == "dgc":
        corrects = momentum_in_compression(job) and not again
        moving = corrects and job.optimizer.name == "sgd" and job.optimizer.momentum > 0
        return each.size * (2 if moving else 1)
    return each.size + back + (each.size if kind in MOMENTUM_ONLY else 0)


# -- replicas that train apart ------------------------------------------------------------------------


def meeting(job: Job, place: Place, backend: Backend) -> Iterator[Sent]:
    """What replicas send in the step in which all of them meet (streaming: the last fragment).

    With ``overlap`` the sum began some steps before: of one in two stages only the way back is left.
    """
    sync, ranks = job.sync, replica_count(job.layout)
    if not apart(job):
        return
    elements = _meeting_elements(job, place)
    if not elements:
        return
    w = place.wide_bytes
    axis, index = meeting_place(job, place)
    if sync.overlap:
        if sync.compression not in ("none", "dgc"):
            *_, back = _two_stages(job, _outer_sum(elements, axis, ranks), w)
            yield replace(back, phase="publish")
        return
    if sync.strategy != "easgd":
        wired = wire.all_reduce(1, _COUNT_BYTES, ranks, backend, index=index)
        yield Sent(axis, "all_reduce", "publish", _COUNT_BYTES, wired, 1, "8 bytes: tokens of the replica")
    if sync.compression != "none":
        outer = _outer_sum(elements, axis, ranks)
        sums = _sparse(job, outer, w) if sync.compression == "dgc" else _two_stages(job, outer, w)
        yield from (replace(sent, phase="publish") for sent in sums)
        return
    elements += -elements % ranks if sync.strategy == "diloco" else 0
    wired = wire.all_reduce(elements, w, ranks, backend, index=index, ordered=True)
    text = f"{w} bytes x {elements:,} elements that this rank updates"
    yield Sent(axis, "all_reduce", "publish", w * elements, wired, 1, text)


def _outer_sum(elements: int, axis: str, ranks: int) -> _Sum:
    """The sum of outer gradients, padded, over the replicas."""
    return _Sum("copy", axis, elements + -elements % ranks, ranks, (), 1, 1)


def meeting_place(job: Job, place: Place) -> tuple[str, int]:
    """The axis along which replicas stand, and this rank's place on it."""
    layout, where = job.layout, place.coordinates
    if layout.zero == 0 and layout.shard is None:
        return "dp", where.replicate * layout.shard_degree + where.shard
    return "replicate", where.replicate


def _meeting_elements(job: Job, place: Place) -> int:
    counts = [piece.count for unit in _in_order(job, place) for piece in unit.ranges()]
    if job.sync.strategy == "local" and job.sync.average == "state":
        return sum(counts) * (1 + (2 if job.optimizer.name == "adamw" else int(job.optimizer.momentum > 0)))
    return _fragment_sizes(counts, job.sync.fragments)[-1]


def _in_order(job: Job, place: Place) -> Iterator[Bucket | Group]:
    """Every bucket or group by itself, in the order of the network's."""
    divided = division(job, place)
    if divided.grouped:
        for group in groups(place, divided):
            yield from [group] * group.times
        return
    limit = job.bucket_bytes // place.wide_bytes
    tied_apart = place.spec.tied and job.layout.stage_count > 1
    for stage in place.stages:
        for tensors in packed(stage.tensors, limit, tied_apart):
            yield Bucket(tensors, divided, 1)


def _fragment_sizes(counts: Sequence[int], fragments: int) -> list[int]:
    """Elements of consecutive lists of ranges, each range in the list its middle falls in."""
    total, before, sizes = sum(counts), 0, [0] * fragments
    for count in counts:
        sizes[min(fragments - 1, (before + count // 2) * fragments // max(total, 1))] += count
        before += count
    return sizes


def shared_bytes(job: Job, place: Place) -> int:
    """Bytes of what replicas keep beside their own parameters: the shared model, outer momentum, residuals."""
    if not apart(job) or job.sync.strategy == "local":
        return 0
    ranks, w = replica_count(job.layout), place.wide_bytes
    owned = sum(unit.owned * unit.times for unit in units(job, place))
    if job.sync.strategy == "easgd":
        return w * owned
    total = 0
    for size in _fragments(job, place, owned):  # each padded by itself
        total += 2 * (size + -size % ranks)
        if job.sync.compression != "none":
            total += 2 * _remembered(job, _outer_sum(size, "", ranks), again=False, kind=job.sync.compression)
    return w * total


def _fragments(job: Job, place: Place, owned: int) -> list[int]:
    """Elements of each fragment of the ``owned`` ones; of one fragment without a look at every range."""
    if job.sync.fragments == 1:
        return [owned]
    return _fragment_sizes(
        [piece.count for unit in _in_order(job, place) for piece in unit.ranges()], job.sync.fragments
    )
