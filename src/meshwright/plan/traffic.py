"""Everything a rank sends in a steady step, by mesh axis, operation and phase: payload, wire bytes, messages.

One ``Sent`` for each origin of traffic (the gathers of column-split products in forward, the reduction of buckets, and
so on); ``sends`` adds up what shares axis, operation and phase, as the Ledger does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshwright.job.job import Job
from meshwright.job.validate_less_often import apart, replica_count
from meshwright.ledger.ledger import Send
from meshwright.plan import wire
from meshwright.plan.compressed import compressed_sums, compresses, meeting
from meshwright.plan.passes import Passes, passes_of
from meshwright.plan.place import Place, StagePlace
from meshwright.plan.sent import Sent
from meshwright.plan.state import Division, buckets, division, stage_groups, units
from meshwright.plan.sync_traffic import DIRECT, algorithm_sums
from meshwright.plan.wire import Backend

_COUNT_BYTES = 8
"""Numbers that ranks agree on are int64 or float64."""


def traffic(job: Job, place: Place, backend: Backend = "gloo") -> list[Sent]:
    """All traffic of a steady step of one rank.

    Args:
        job: resolved.
        place: the rank's.
        backend: whose algorithms wire bytes are of.
    """
    divided = division(job, place)
    passes = {stage.number: passes_of(job, place, stage) for stage in place.stages}
    if divided.grouped:
        reduced = _grouped(job, place, divided, passes, backend)
    else:
        reduced = _bucketed(job, place, divided, backend)
    found = [
        *_batch(job, backend),
        *_pipeline(job, place),
        *(sent for stage in place.stages for sent in _tensor(job, place, stage, passes[stage.number], backend)),
        *reduced,
        *_replicated_gradients(job, place, backend),
        *_tied(job, place, backend),
        *_metrics(job, place, backend),
        *meeting(job, place, backend),
    ]
    return [sent for sent in found if sent.messages]


def depends_on_tp_rank(job: Job, place: Place) -> bool:
    """Whether the ranks of a tensor parallel group put different numbers of bytes on their links: uneven pieces."""
    elements = _replicated_elements(job, place)
    return elements % job.layout.tp > 0 and (job.layout.tp - 1) * elements * place.wide_bytes > wire.ONE_ROUND


def sends(found: Iterable[Sent]) -> tuple[Send, ...]:
    """The sums by axis, operation and phase, in the order of the Ledger."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for sent in found:
        total = sums.setdefault((sent.axis, sent.operation, sent.phase), [0, 0, 0])
        for index, value in enumerate((sent.payload, sent.wired.bytes, sent.messages)):
            total[index] += value
    return tuple(
        Send(axis=axis, operation=operation, phase=phase, payload=payload, wire=wired, messages=messages)
        for (axis, operation, phase), (payload, wired, messages) in sorted(sums.items())
    )


# -- numbers that all ranks agree on ------------------------------------------------------------------


def _batch(job: Job, backend: Backend) -> Iterator[Sent]:
    """The valid tokens of the global batch, counted before the step."""
    dp = job.layout.dp
    counts = replica_count(job.layout) if apart(job) else 1
    if dp > 1:
        wired = wire.all_reduce(counts, _COUNT_BYTES, dp, backend)
        text = "8 bytes: the count of valid tokens" + (f" x {counts} replicas" if counts > 1 else "")
        yield Sent("dp", "all_reduce", "batch", counts * _COUNT_BYTES, wired, 1, text)


def _metrics(job: Job, place: Place, backend: Backend) -> Iterator[Sent]:
    """Losses of all micro-batches, the norm and the wish to stop, agreed at the end."""
    world = job.layout.ranks
    if world == 1:
        return
    deterministic = job.train.deterministic
    losses = job.layout.dp * place.micro_batches
    norms = replica_count(job.layout) if apart(job) else 2 if deterministic else 1
    numbers = 1 + norms + losses
    wired = wire.all_reduce(numbers, _COUNT_BYTES, world, backend)
    text = f"8 bytes x ({losses} losses + {numbers - losses}: {norms} for the norm, 1 for a wish to stop)"
    yield Sent("world", "all_reduce", "metrics", numbers * _COUNT_BYTES, wired, 1, text)
    if deterministic:
        wired = wire.all_reduce(1, _COUNT_BYTES, world, backend, index=place.rank, ordered=backend == "gloo")
        yield Sent("world", "all_reduce", "metrics", _COUNT_BYTES, wired, 1, "8 bytes: the largest gradient")


# -- pipeline -----------------------------------------------------------------------------------------


def _pipeline(job: Job, place: Place) -> Iterator[Sent]:
    """Outputs to the rank of the next stage, gradients to the rank of the one before; none within a rank."""
    here = {stage.number for stage in place.stages}
    count, size = place.micro_batches, place.boundary_bytes
    tokens, hidden = place.boundary
    shape = f"{place.parameter_bytes} bytes x {tokens} tokens x {hidden} hidden x {count} micro-batches"
    for stage in place.stages:
        for other, phase, leaves in (
            (stage.number + 1, "forward", not stage.last),
            (stage.number - 1, "backward", not stage.first),
        ):
            if leaves and other not in here:
                text = f"stage {stage.number} to {other}: {shape}"
                yield Sent("pp", "send", phase, count * size, wire.send(count * size), count, text)


# -- tensor parallel ----------------------------------------------------------------------------------


def _tensor(job: Job, place: Place, stage: StagePlace, passes: Passes, backend: Backend) -> Iterator[Sent]:
    """Gathers before column-split products, reduce-scatters after row-split ones, and the same turned round."""
    degree = job.layout.tp
    if degree == 1:
        return
    m, layers = place.micro_batches, len(stage.layers)
    split, first, last = passes.split, int(stage.first), int(stage.last)
    gather, scatter = "all_gather", "reduce_scatter"

    def moved(operation: str, phase: str, count: int, origin: str) -> Sent:
        tokens = place.local_tokens if operation == gather else place.tokens
        payload = place.parameter_bytes * tokens * place.hidden * count
        wired = (wire.all_gather if operation == gather else wire.reduce_scatter)(payload, degree)
        text = f"{origin}: {place.parameter_bytes} bytes x {tokens} tokens x {place.hidden} hidden x {count}"
        return Sent("tp", operation, phase, payload, wired, count, text)

    yield moved(gather, "forward", m * (2 * layers + last), "inputs of column-split products")
    yield moved(scatter, "forward", m * (2 * layers + first), "outputs of row-split products, embedding")
    columns = m * (2 * layers + last)
    yield moved(gather, "backward", columns, "inputs of column-split products, for their weight gradients")
    yield moved(scatter, "backward", columns, "input gradients of column-split products")
    yield moved(gather, "backward", m * (2 * layers + first), "output gradients of row-split products, embedding")
    yield moved(gather, "backward", split * 2 * layers, "the same again where backward is split in two")
    if stage.recompute == "full":
        # Recomputing stops once all is saved: the last product of a layer is not computed again, unless the mask of
        # a dropout is saved behind it.
        products = 2 if place.spec.dropout > 0 else 1
        yield moved(gather, "recompute", m * 2 * layers, "inputs of column-split products, again")
        yield moved(scatter, "recompute", m * products * layers, "outputs of row-split products, again")
    if stage.last:
        yield from _loss(place, degree, backend)


def _loss(place: Place, degree: int, backend: Backend) -> Iterator[Sent]:
    """The vocabulary-parallel loss: the maximum of each token, then its sum of exponentials and its target's logit."""
    m, w, index = place.micro_batches, place.wide_bytes, place.coordinates.tp
    for numbers, name, ordered in ((1, "largest logit", True), (2, "sum and target's logit", False)):
        elements = numbers * place.tokens
        native = ordered and backend == "gloo"
        wired = wire.all_reduce(elements, w, degree, backend, index=index, ordered=native).times(m)
        text = f"{name}: {w} bytes x {elements} x {m} micro-batches"
        yield Sent("tp", "all_reduce", "forward", m * w * elements, wired, m, text)


def _replicated_elements(job: Job, place: Place) -> int:
    return sum(
        unit.times * piece.count for unit in units(job, place) for piece in unit.ranges() if piece.tensor.tp_replicated
    )


def _replicated_gradients(job: Job, place: Place, backend: Backend) -> Iterator[Sent]:
    """Gradients of tensors that are whole on every tensor parallel rank, summed in rank order, all together."""
    degree, w = job.layout.tp, place.wide_bytes
    if degree == 1:
        return
    elements = _replicated_elements(job, place)
    if elements:
        wired = wire.all_reduce(elements, w, degree, backend, index=place.coordinates.tp, ordered=True)
        text = f"{w} bytes x {elements:,} elements of norms, biases and positions that this rank updates"
        yield Sent("tp", "all_reduce", "reduce", w * elements, wired, 1, text)


def _tied(job: Job, place: Place, backend: Backend) -> Iterator[Sent]:
    """The gradients of the two copies of a tied embedding, summed where they stand on two ranks."""
    here = sum(stage.first + stage.last for stage in place.stages)
    if not place.spec.tied or job.layout.stage_count == 1 or here != 1:
        return
    w = place.wide_bytes
    for unit in units(job, place):
        for piece in unit.ranges():
            if piece.tensor.embedding:
                wired = wire.all_reduce(piece.count, w, 2, backend)
                text = f"{w} bytes x {piece.count:,} elements of the embedding that this rank updates"
                yield Sent("embedding", "all_reduce", "reduce", w * piece.count, wired, 1, text)


# -- data parallel ------------------------------------------------------------------------------------


def _bucketed(job: Job, place: Place, divided: Division, backend: Backend) -> Iterator[Sent]:
    """Replicated and ZeRO-1: each bucket once a step; deterministic mode after every micro-step."""
    if divided.degree == 1:
        return
    flat, w, p, m = buckets(job, place, divided), place.wide_bytes, place.parameter_bytes, place.micro_batches
    size, count = sum(bucket.size * bucket.times for bucket in flat), sum(bucket.times for bucket in flat)
    chunk, piece = size // divided.shards, size // divided.degree
    copies, shards, axis = divided.copies, divided.shards, divided.copy_axis
    direct = job.sync.algorithm in DIRECT and not compresses(job)
    if compresses(job):
        yield from compressed_sums(job, place, backend)
    elif not direct:
        sizes = [(bucket.chunk, bucket.times) for bucket in flat]
        yield from algorithm_sums(job, place, divided, sizes, backend)
    elif divided.every_step:
        payload = w * size * m
        text = f"{w} bytes x {size:,} elements in {count} buckets x {m} micro-batches"
        wired = wire.reduce_scatter(payload, divided.degree)
        yield Sent("dp", "all_to_all", "reduce", payload, wired, m * count, text)
    elif shards > 1:
        text = f"{w} bytes x {size:,} elements in {count} buckets"
        yield Sent("shard", "reduce_scatter", "reduce", w * size, wire.reduce_scatter(w * size, shards), count, text)
    if copies > 1 and direct:
        if not divided.every_step:
            text = f"{w} bytes x {chunk:,} elements: this rank's 1/{shards} of {count} buckets"
            wired = wire.reduce_scatter(w * chunk, copies)
            yield Sent(axis, "reduce_scatter", "reduce", w * chunk, wired, count, text)
        text = f"{w} bytes x {piece:,} elements: 1/{divided.degree} of {count} buckets"
        yield Sent(axis, "all_gather", "reduce", w * piece, wire.all_gather(w * piece, copies), count, text)
    if shards > 1:
        text = f"{p} bytes x {chunk:,} elements: updated parameters, 1/{shards} of {count} buckets"
        yield Sent("shard", "all_gather", "publish", p * chunk, wire.all_gather(p * chunk, shards), count, text)


def _grouped(
    job: Job, place: Place, divided: Division, passes: dict[int, Passes], backend: Backend
) -> Iterator[Sent]:
    """ZeRO-2 and 3: groups are gathered when used and reduced after every micro-batch."""
    if compresses(job):
        yield from compressed_sums(job, place, backend)
    for stage in place.stages:
        yield from _gathered(place, stage, divided, passes[stage.number])
        yield from _reduced(job, place, stage, divided, backend)


def _gathered(place: Place, stage: StagePlace, divided: Division, passes: Passes) -> Iterator[Sent]:
    p, shards = place.parameter_bytes, divided.shards
    for group in stage_groups(stage, divided):
        inside = group.tensors is stage.block
        name = "layers" if inside else "what is outside the layers"
        counts = passes.layer_gathers(group.times) if inside else passes.rest_gathers()
        for phase, count in zip(("forward", "backward"), counts, strict=True):
            payload = p * group.row * count
            text = f"{name}: {p} bytes x {group.row:,} elements, 1/{shards} of a group, x {count}"
            yield Sent("shard", "all_gather", phase, payload, wire.all_gather(payload, shards), count, text)


def _reduced(job: Job, place: Place, stage: StagePlace, divided: Division, backend: Backend) -> Iterator[Sent]:
    if compresses(job):
        return  # all stages together
    if job.sync.algorithm not in DIRECT:
        yield from _reduced_by_algorithm(job, place, stage, divided, backend)
        return
    w, m, copies, shards = place.wide_bytes, place.micro_batches, divided.copies, divided.shards
    for group in stage_groups(stage, divided):
        times = group.times
        payload = w * group.size * m * times
        text = f"{w} bytes x {group.size:,} elements x {times} alike x {m} micro-batches"
        axis, operation = ("dp", "all_to_all") if divided.every_step else ("shard", "reduce_scatter")
        yield Sent(axis, operation, "reduce", payload, wire.reduce_scatter(payload, shards), m * times, text)
        if copies > 1:
            part, whole = w * group.piece * times, w * group.piece * copies * times
            text = f"{w} bytes x {group.piece * copies:,} elements x {times} alike, across {copies} copies"
            axis, wired = divided.copy_axis, wire.reduce_scatter(whole, copies)
            yield Sent(axis, "reduce_scatter", "reduce", whole, wired, times, text)
            text = f"{w} bytes x {group.piece:,} elements x {times} alike, back to {copies} copies"
            yield Sent(axis, "all_gather", "reduce", part, wire.all_gather(part, copies), times, text)


def _reduced_by_algorithm(
    job: Job, place: Place, stage: StagePlace, divided: Division, backend: Backend
) -> Iterator[Sent]:
    """Shards sum their rows, copies all of an accumulator, which is padded to a multiple of them."""
    found = stage_groups(stage, divided)
    rows = [(group.row, group.times) for group in found]
    sums = [(group.piece * divided.copies, group.times) for group in found]
    yield from algorithm_sums(job, place, replace(divided, copies=1), rows, backend, place.micro_batches)
    yield from algorithm_sums(job, place, replace(divided, shards=1), sums, backend)
