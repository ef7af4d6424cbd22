"""Bytes of the fullest rank, of many layouts at once: state, activations in flight, logits, buffers.

Per token, with sizes in elements of ``e`` bytes, a layer keeps for backward what its operations take in:

    both norms' inputs and outputs     4 h             whole, or 1/tp with sequence parallel
    q, k, v and the context            2 q + 2 kv      1/tp
    activation function                3 f, gated 4 f: its inputs, and the input of the last product    1/tp
    dropout                            masks of 1 byte
    attention                          fused: one float32 a head; otherwise heads x sequence scores (2.5 x with dropout)

which for GPT (q = kv = h, f = 4 h, e = 2) is Korthikanti's ``s b h (10 + 24 / t + 5 a s / (h t))``. The exact form of
meshwright's own program is in ``plan/predict.py``; this one agrees with it within about two per cent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.job.layout import SPLIT_BACKWARD_SCHEDULES
from meshwright.plan.arrays import RECOMPUTES, SCHEDULES, Floats, Ints, Layouts
from meshwright.plan.rules import Rules
from meshwright.plan.shape import Shape, Value
from meshwright.plan.stages import Held, held, is_delayed, is_v, uneven_stages
from meshwright.schedule.in_flight_closed import in_flight_closed, stage_in_flight_closed

_FULL, _SELECTIVE = RECOMPUTES.index("full"), RECOMPUTES.index("selective")
_ZBV = SCHEDULES.index("zbv")
_SPLITS = np.array([name in SPLIT_BACKWARD_SCHEDULES for name in SCHEDULES])


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the fullest rank at its peak."""

    parts: dict[str, Floats]
    peak: Floats
    fullest: Ints
    """Its pipeline rank."""


def memory_use(shape: Shape, layouts: Layouts, rules: Rules, element: float = 2.0,
               ranks: tuple[Held, Held, Held] | None = None) -> MemoryUse:  # fmt: skip
    """Memory of the fullest pipeline rank.

    Args:
        shape: sizes.
        layouts: columns.
        rules: of the program.
        element: bytes of one activation element.
        ranks: what pipeline ranks hold, where not by ``stages.held``.
    """
    each = [rank_memory(shape, layouts, rules, element, rank) for rank in ranks or held(layouts, shape.layers)]
    peaks = np.stack([sum(parts.values()) for parts in each])
    which = np.argmax(peaks, axis=0)
    numbers = np.stack([rank.rank for rank in ranks or held(layouts, shape.layers)])
    parts = {name: np.choose(which, [one[name] for one in each]) for name in each[0]}
    return MemoryUse(parts, np.max(peaks, axis=0), np.choose(which, list(numbers)))


def rank_memory(shape: Shape, layouts: Layouts, rules: Rules, element: float, rank: Held) -> dict[str, Floats]:
    """Bytes by category of one pipeline rank, at the fuller of two moments: the head's and a layer's backward."""
    tp = layouts.tp
    tokens: Floats = np.asarray(layouts.micro_batch * shape.sequence, np.float64)
    local = np.where(layouts.sequence_parallel, 1 / tp, 1.0)
    own = element * tokens * shape.hidden * local
    per_layer = shape.split_parameters() / tp + shape.whole_parameters()
    ends = np.ceil(shape.vocabulary / tp) * shape.hidden
    # A tied head in a stage of its own is a second copy, also on the embedding's rank.
    heads = np.where(rank.head & ((layouts.pp > 1) | (shape.tied == 0)), 1.0, 0.0)
    outside = (rank.embedding + heads) * ends + rank.embedding * shape.positions * shape.hidden
    outside = outside + rank.head * shape.norm_parameters * shape.hidden
    count = rank.layers * per_layer + outside
    parts = _state(count, layouts, rules)

    kept = layer_bytes(shape, layouts, rules, element)
    chunk = rank.layers / layouts.virtual
    flight, waiting = _in_flight(layouts, rank, chunk * kept, chunk * _weight_part(shape, layouts, element, tokens))
    chunk = _full_chunk(shape, layouts, rank, flight, chunk)
    saved = flight * (chunk * kept + rank.embedding * rules.dropout * tokens * shape.hidden * local)
    sizes = (layouts.schedule, layouts.pp, layouts.virtual, layouts.micro_batches, rank.rank, layouts.virtual - 1)
    losses = stage_in_flight_closed(*sizes)
    if _SPLITS[layouts.schedule].any():
        losses = np.where(layouts.recompute == _FULL, stage_in_flight_closed(*sizes, "input"), losses)
    logits = losses * rules.logit_bytes * tokens * np.ceil(shape.vocabulary / tp)
    head_gradient = rules.head_gradient_bytes * ends
    if rules.head_gradient_beside_logits:
        at_head, made = logits + 2 * own, head_gradient + own
    else:
        at_head, made = np.maximum(logits, head_gradient) + 2 * own, 0.0 * own
    at_head, made = rank.head * at_head, rank.head * made
    working = layer_bytes(shape, layouts.with_columns(recompute=0), rules, element)
    again = np.where(layouts.recompute > 0, np.maximum(working - kept, 0.0), 0.0)
    passing = rules.backward_passing * layer_passing(shape, layouts, element)
    if rules.backward_passing:
        # ZeRO-2 and 3: a layer's weight gradients stay until all are there, and are laid out to be reduced.
        grouped = (element + rules.wire_bytes) * per_layer
        passing = passing + np.where((layouts.zero >= 2) & (layouts.shard > 1), grouped, 0.0)
    first = at_head + made >= again + passing
    activations = saved + np.where(first, at_head, again)
    temporary = np.where(first, made, passing) + _buffers(shape, layouts, rules, per_layer, count, outside)
    whole = 3 * element * tokens * shape.hidden if rules.backward_passing else 2 * element * tokens * shape.hidden
    temporary = temporary + np.where(layouts.sequence_parallel & (tp > 1), whole, 0.0)
    parts["activations"] = activations
    parts["temporary"] = temporary + waiting + rules.context_bytes + rules.slack * activations
    return {name: np.broadcast_to(np.asarray(value, float), layouts.dp.shape) for name, value in parts.items()}


def _full_chunk(shape: Shape, layouts: Layouts, rank: Held, flight: Floats, mean: Floats) -> Floats:
    """Layers of a stage, weighted by the micro-batches that each stage of the rank holds at the peak.

    Earlier stages hold more of both, so a rank with uneven stages holds more than their mean says.
    """
    if not np.any((layouts.virtual > 1) & (np.mod(shape.layers, layouts.stage_total) > 0)):
        return mean
    base, more, first = uneven_stages(layouts, shape.layers, rank.rank)
    sizes = (layouts.schedule, layouts.pp, layouts.virtual, layouts.micro_batches, rank.rank)
    in_first = stage_in_flight_closed(*sizes, 0)
    in_last = stage_in_flight_closed(*sizes, layouts.virtual - 1)
    folded = is_v(layouts)
    among = np.where(folded, first * in_first + (more - first) * in_last, more * in_first)
    weighted = base + np.minimum(among, flight) / np.maximum(flight, 1)
    return np.where((layouts.virtual > 1) & (layouts.last_fewer == 0), np.maximum(weighted, mean), mean)


def _in_flight(layouts: Layouts, rank: Held, kept: Floats, started: Floats) -> tuple[Floats, Floats]:
    """Micro-batches alive at the peak, and bytes that weight parts of split backward passes will start from.

    A stage that is first, or recomputes itself whole, takes both parts at once.

    Args:
        layouts: columns.
        rank: the pipeline rank.
        kept: bytes a stage saves of one micro-batch.
        started: bytes a weight part starts from.
    """
    sizes = (layouts.schedule, layouts.pp, layouts.virtual, layouts.micro_batches, rank.rank)
    alive = in_flight_closed(*sizes).astype(float)
    splits = _SPLITS[layouts.schedule] & (layouts.pp > 1)
    if not splits.any():
        return alive, np.zeros_like(alive)
    whole = (layouts.recompute == _FULL) | ((rank.rank == 0) & (layouts.virtual == 1))
    alive = np.where(splits & whole, in_flight_closed(*sizes, "input"), alive)
    parted = splits & ~whole
    folded = parted & is_v(layouts)
    pending = np.where(folded, 1.0, np.minimum(rank.rank + 1, alive))
    # ZBV: while it drains, fewer are alive but of most of them the weight part waits.
    zbv = folded & (layouts.schedule == _ZBV)
    drain_alive, drain_pending = np.minimum(layouts.pp + rank.rank, alive), np.minimum(2.0 * rank.rank + 1, alive)
    later = zbv & (drain_alive * kept + drain_pending * started > alive * kept + pending * started)
    alive, pending = np.where(later, drain_alive, alive), np.where(later, drain_pending, pending)
    pending = np.where(folded & ~zbv, 0.0, pending)
    return alive, np.where(parted, pending * started, 0.0)


def _weight_part(shape: Shape, layouts: Layouts, element: float, tokens: Floats) -> Floats:
    """Gradients that the weight part of one layer starts from: of the products' and norms' outputs.

    Selective recomputation has by then made the attention's output again, too.
    """
    tp = layouts.tp
    local = np.where(layouts.sequence_parallel, 1 / tp, 1.0)
    inside = shape.query + 2 * shape.key_value + shape.ffn * (1 + shape.gated)
    inside = inside + np.where(layouts.recompute == _SELECTIVE, shape.query, 0.0)
    return np.asarray(element * tokens * (inside / tp + 4 * shape.hidden * local), np.float64)


def layer_passing(shape: Shape, layouts: Layouts, element: float) -> Floats:
    """What comes and goes in one layer's backward: gradients of the MLP's insides and of its largest weight."""
    inner = shape.ffn / layouts.tp
    tokens = layouts.micro_batch * shape.sequence
    return element * (inner * (2 + shape.gated) * tokens + inner * (1 + shape.gated) * shape.hidden)


def _state(count: Floats, layouts: Layouts, rules: Rules) -> dict[str, Floats]:
    """Parameters (wide copies among them), gradients and moments."""
    zero, shard = layouts.zero, layouts.shard
    versions = np.where(is_delayed(layouts), 2.0, 1.0)
    sharded = rules.parameter_bytes if rules.full_working_copy or not rules.master_bytes else 0.0
    whole = (zero < 2) | ((zero == 2) & rules.full_working_copy)
    working = np.where(whole, count, count / shard * (sharded / rules.parameter_bytes)) * rules.parameter_bytes
    owned = count / np.where(zero >= 1, shard, 1)
    gradients = count / np.where(zero >= rules.sharded_gradients_from, shard, 1)
    return {
        "parameters": versions * (working + owned * rules.master_bytes),
        "gradients": versions * gradients * rules.gradient_bytes,
        "optimizer": owned * rules.moment_bytes,
    }


def _buffers(shape: Shape, layouts: Layouts, rules: Rules, per_layer: Floats, count: Floats,
             outside: Floats) -> Floats:  # fmt: skip
    """Gathered parameters (ZeRO-2: all; ZeRO-3: some layers' and those outside layers), and gradients on their way.

    A reduction of the last micro-batch may still be under way: its input and its copy for the exchange.
    """
    gathered = rules.gather_bytes * np.where(layouts.zero >= 3, rules.layers_gathered * per_layer + outside, count)
    under_way = np.where(layouts.micro_batches > 1, np.maximum(outside, per_layer), per_layer)
    copies = 1 + (rules.gradients_under_way - 1) * (layouts.shard - 1) / layouts.shard
    sums = copies * rules.wire_bytes * under_way
    flat = np.where((layouts.zero == 2) & rules.full_working_copy, 0.0, gathered) + sums
    return np.where((layouts.shard > 1) & (layouts.zero >= 2), flat, 0.0) + 0.0 * shape.hidden


def layer_bytes(shape: Shape, layouts: Layouts, rules: Rules, element: Value) -> Floats:
    """Bytes that one layer keeps of one micro-batch until its backward, under the layout's recompute policy."""
    tp, sequence = layouts.tp, shape.sequence
    tokens = layouts.micro_batch * sequence
    local = np.where(layouts.sequence_parallel, 1 / tp, 1.0)
    hidden = shape.hidden * local
    dropout = float(rules.dropout)
    split = 2 * shape.query + 2 * shape.key_value + shape.ffn * (2 + shape.gated)
    core = 4.0 * shape.heads if rules.fused_attention else shape.heads * sequence * (element + 3 * dropout)
    base = (4 * element + 2 * dropout) * hidden + element * split / tp
    plain = base + core / tp
    selective = base
    if rules.layer_output_kept:
        selective = rules.layer_output_kept * element * shape.hidden + 0.0 * base
    elif rules.selective_part is not None:  # that part of the layers is recomputed whole
        selective = (1 - rules.selective_part) * plain + rules.selective_part * element * hidden
    policy = layouts.recompute
    kept = np.where(policy == _FULL, element * hidden, np.where(policy == _SELECTIVE, selective, plain))
    return np.asarray(tokens * kept, np.float64)
