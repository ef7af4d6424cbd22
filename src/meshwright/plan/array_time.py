"""Seconds of a step, of many layouts at once: layers, ends, collectives, pipeline, optimizer.

Collectives stand beside the computation that may hide them. ``docs/concepts/time-model.md`` has the formulas in one
piece; one layer's are in ``layer_time``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.arrays import RECOMPUTES, SCHEDULES, Floats, Layouts, axis_strides
from meshwright.plan.collectives import Group, Network, all_reduce_seconds, round_seconds, send_seconds
from meshwright.plan.exchange import Leg, leg_seconds
from meshwright.plan.layer_time import LayerTime, Machine, layer_time, stream_elements
from meshwright.plan.rules import Rules
from meshwright.plan.server_time import server_time
from meshwright.plan.shape import Shape
from meshwright.plan.stages import Held, held
from meshwright.plan.sync_legs import Legs, SyncTerms, coded_passes, mean_meeting

__all__ = [
    "LayerTime",
    "Machine",
    "MicroBatchSeconds",
    "StepTime",
    "fill_factor",
    "layer_time",
    "pass_time",
    "step_time",
    "stream_elements",
]

_FULL, _SELECTIVE = RECOMPUTES.index("full"), RECOMPUTES.index("selective")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by part; they sum to ``total``."""

    parts: dict[str, Floats]
    total: Floats


@dataclass(frozen=True)
class MicroBatchSeconds:
    """What one micro-batch takes on a pipeline rank, by what the rank holds; exposed communication included.

    Seconds, arrays over the layouts. An event simulation puts them together stage by stage, where ``step_time``
    takes the slowest rank and a formula for the bubble.
    """

    layer_forward: Floats
    layer_input: Floats
    """Backward of one layer without ``layer_weight``, recomputation included."""
    layer_weight: Floats
    """The products that make weight gradients."""
    embedding: Floats
    """Forward and backward."""
    head_forward: Floats
    head_backward: Floats
    host: Floats
    """Of every micro-batch on every rank."""
    send: Floats
    """One message between stages."""


def pass_time(shape: Shape, layouts: Layouts, network: Network, machine: Machine, rules: Rules,
              terms: SyncTerms | None = None) -> MicroBatchSeconds:  # fmt: skip
    """What ``step_time`` is made of, for an event simulation."""
    return _Step(shape, layouts, network, machine, rules, None, None, terms).passes()


def step_time(shape: Shape, layouts: Layouts, network: Network, machine: Machine, rules: Rules,
              layer: LayerTime | None = None, ranks: tuple[Held, Held, Held] | None = None,
              terms: SyncTerms | None = None) -> StepTime:  # fmt: skip
    """The whole step.

    Args:
        shape: sizes.
        layouts: columns.
        network: links.
        machine: rates.
        rules: of the program.
        layer: times of one layer, where they have been computed already.
        ranks: what pipeline ranks hold, where not by ``stages.held``.
        terms: how the data parallel ranks agree; absent: by plain sums on NCCL.
    """
    return _Step(shape, layouts, network, machine, rules, layer, ranks, terms).result()


class _Step:
    """One call of :func:`step_time`, its common quantities named once."""

    def __init__(self, shape: Shape, layouts: Layouts, network: Network, machine: Machine, rules: Rules,
                 layer: LayerTime | None, ranks: tuple[Held, Held, Held] | None,
                 terms: SyncTerms | None) -> None:  # fmt: skip
        self.shape, self.layouts, self.network, self.machine, self.rules = shape, layouts, network, machine, rules
        self.strides = axis_strides(layouts)
        self.tensor_group = Group.of(layouts.tp, self.strides["tp"], network)
        self.layer = layer or layer_time(
            shape, layouts.tp, layouts.micro_batch, layouts.sequence_parallel.astype(float), machine, rules
        )
        self.ranks = ranks or held(layouts, shape.layers)
        self.terms = terms or SyncTerms.plain(rules)
        self.legs = Legs(self.terms, shape, layouts, network, self.ranks, self.strides)
        self.rows: Floats = np.asarray(layouts.micro_batch * shape.sequence, np.float64)

    def result(self) -> StepTime:
        compute = self._layer_parts()
        pipeline = self._pipeline(compute)
        reduction, gathers = self._gradients(pipeline)
        update = self._optimizer()
        parts = {**pipeline, "optimizer": update, "other": self.rules.step_seconds + pipeline["other"]}
        nodes = np.maximum(1.0, self.layouts.ranks / self.network.devices_per_node)
        busy = pipeline["forward"] + pipeline["backward"] + pipeline["recompute"]
        parts["waiting"] = self.rules.wait_per_doubling * np.log2(nodes) * busy
        for axis in ("shard", "replicate"):
            parts[axis] = reduction[axis] + gathers[axis]
        self._agree(parts)
        length = self.layouts.dp.shape
        slowdown = self.rules.slowdown
        parts = {name: np.broadcast_to(np.asarray(value * slowdown), length) for name, value in parts.items()}
        total = np.zeros(length)
        for seconds in parts.values():
            total += seconds
        return StepTime(parts, total)

    def passes(self) -> MicroBatchSeconds:
        """See :class:`MicroBatchSeconds`."""
        layer, shape, machine, tp = self._layer_parts(), self.shape, self.machine, self.layouts.tp
        forward_gather, backward_gather = self._zero3_exposed(layer)
        embedding, head_forward, head_backward = self._ends()
        query, key_value, ffn = shape.query / tp, shape.key_value / tp, shape.ffn / tp
        products = ((shape.hidden, query + 2 * key_value), (query, shape.hidden),
                    (shape.hidden, ffn * (1 + shape.gated)), (ffn, shape.hidden))  # fmt: skip
        weight = sum(machine.product(k, self.rows, n) for k, n in products)
        backward = layer["backward"] + layer["recompute"] + layer["tensor_backward"] + backward_gather
        payload = self.rows * shape.hidden * machine.element
        send = send_seconds(payload, self.strides["pp"], self.network, self.rules.sliced_transfers, tp)
        parts = {
            "layer_forward": layer["forward"] + layer["tensor_forward"] + forward_gather,
            "layer_input": np.maximum(backward - weight, 0.0),
            "layer_weight": np.minimum(weight, backward),
            "embedding": embedding,
            "head_forward": head_forward,
            "head_backward": head_backward,
            "host": self.rules.micro_batch_seconds,
            "send": send,
        }
        length = self.layouts.dp.shape
        return MicroBatchSeconds(
            **{name: np.broadcast_to(np.asarray(value, float), length) for name, value in parts.items()}
        )

    def _layer_parts(self) -> dict[str, Floats]:
        """Seconds of one layer and micro-batch: compute, host floors and exposed communication."""
        layer, policy, rules = self.layer, self.layouts.recompute, self.rules
        part = layer.core if rules.selective_part is None else rules.selective_part * layer.forward
        again = np.where(policy == _FULL, layer.forward, np.where(policy == _SELECTIVE, part, 0.0))
        # A micro-batch's host work is a floor under the device's.
        forward = np.maximum(layer.forward, layer.host_forward)
        host_again = np.where(policy == _FULL, layer.host_forward, 0.0)
        backward = np.maximum(layer.backward + again, layer.host_backward + host_again)
        tensor = self._tensor_round()
        rounds_again = np.where(policy == _FULL, 4.0, 0.0)
        # With sequence parallel the inputs of both column-split products are gathered again for their weights.
        rounds_back = np.where(self.layouts.sequence_parallel, 6.0, 4.0)
        hidden_part = 1 - rules.overlap_tensor
        return {
            "forward": forward,
            "backward": backward - again,
            "recompute": again,
            "tensor_forward": 4.0 * tensor * hidden_part,
            "tensor_backward": (rounds_back + rounds_again) * tensor * hidden_part,
        }

    def _tensor_round(self) -> Floats:
        """A quarter of a layer's forward communication along tp: one all-gather or reduce-scatter, or half of an
        all-reduce.
        """
        payload = self.rows * self.shape.hidden * self.rules.wire_tp_bytes
        rounds = round_seconds(payload, self.tensor_group, self.network)
        whole = all_reduce_seconds(payload, self.tensor_group, self.network) / 2
        return np.where(self.layouts.sequence_parallel, rounds, whole)

    def _ends(self) -> tuple[Floats, Floats, Floats]:
        """Seconds of embedding (forward and backward), of head and loss forward, and backward."""
        shape, machine, tp = self.shape, self.machine, self.layouts.tp
        vocabulary = shape.vocabulary / tp
        head = machine.product(self.rows, shape.hidden, vocabulary)
        back = machine.product(self.rows, vocabulary, shape.hidden)
        back = back + machine.product(shape.hidden, self.rows, vocabulary)
        logits = self.rules.logit_passes * self.rows * vocabulary * 4 / machine.bandwidth
        embedding = 6 * self.rows * shape.hidden * machine.element / machine.bandwidth + 6 * machine.launch
        return embedding, head + 0.4 * logits + 6 * machine.launch, back + 0.6 * logits + 6 * machine.launch

    def _pipeline(self, layer: dict[str, Floats]) -> dict[str, Floats]:
        """The step from the first forward to the last backward, by part."""
        layouts, m = self.layouts, self.layouts.micro_batches.astype(float)
        embedding, head_forward, head_backward = self._ends()
        host = self.rules.micro_batch_seconds
        per_layer = sum(layer.values())
        times = [
            rank.layers * per_layer + rank.embedding * embedding + rank.head * (head_forward + head_backward) + host
            for rank in self.ranks
        ]
        gather = sum(self._zero3_exposed(layer))
        slowest = np.maximum(np.maximum(times[0], times[1]), times[2])
        middle = np.maximum(layouts.pp - 2, 0)
        total = times[0] * 1.0 + np.where(layouts.pp > 1, times[2], 0.0) + middle * times[1]
        fill = np.maximum(total - slowest, 0.0) * fill_factor(layouts)
        which = np.argmax(np.stack(times), axis=0)
        layers = np.choose(which, [rank.layers for rank in self.ranks])
        has_head = np.choose(which, [rank.head for rank in self.ranks])
        has_embedding = np.choose(which, [rank.embedding for rank in self.ranks])
        transfer = self._transfer()
        return {
            "forward": m * (layers * layer["forward"] + has_head * head_forward + has_embedding * embedding / 3),
            "backward": m * (layers * layer["backward"] + has_head * head_backward + has_embedding * embedding * 2 / 3),
            "recompute": m * layers * layer["recompute"],
            "tp": m * layers * (layer["tensor_forward"] + layer["tensor_backward"]),
            "pp": transfer,
            "bubble": fill,
            "zero3": m * layers * gather,
            "other": m * host,
        }

    def _transfer(self) -> Floats:
        """Exposed sends between stages: two a micro-batch and boundary of a rank, and the fill's."""
        layouts = self.layouts
        payload = self.rows * self.shape.hidden * self.machine.element
        one = send_seconds(payload, self.strides["pp"], self.network, self.rules.sliced_transfers, layouts.tp)
        sends = 2 * layouts.micro_batches * layouts.virtual * (1 - self.rules.overlap_pipeline) + 2 * (layouts.pp - 1)
        return np.where(layouts.pp > 1, sends * one, 0.0)

    def _zero3_exposed(self, layer: dict[str, Floats]) -> tuple[Floats, Floats]:
        """Gathers of one layer and micro-batch that computation does not hide, forward and backward (ZeRO-3)."""
        layouts, rules = self.layouts, self.rules
        parameters = self.shape.split_parameters() / layouts.tp + self.shape.whole_parameters()
        gather = self._seconds([self.legs.gather(parameters * rules.gather_bytes)])
        reduce = self._seconds(self.legs.scatter(parameters)) * float(rules.reduce_each_micro_batch)
        forward = layer["forward"] + layer["tensor_forward"]
        backward = layer["backward"] + layer["recompute"] + layer["tensor_backward"]
        hidden = rules.overlap_gathers
        sharded = layouts.zero >= 3
        return (
            np.where(sharded, _exposed(gather, forward, hidden), 0.0),
            np.where(sharded, _exposed(gather + reduce, backward, hidden), 0.0),
        )

    def _local_parameters(self) -> Floats:
        """Parameters on a rank of the fullest pipeline rank, before sharding."""
        shape, tp = self.shape, self.layouts.tp
        per_layer = shape.split_parameters() / tp + shape.whole_parameters()
        ends = shape.vocabulary * shape.hidden / tp
        counts = [rank.layers * per_layer + (1.0 * rank.embedding + 1.0 * rank.head) * ends for rank in self.ranks]
        return np.maximum(np.maximum(counts[0], counts[1]), counts[2])

    def _gradients(self, pipeline: dict[str, Floats]) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Exposed reduction of gradients by axis, and exposed gathers of updated parameters."""
        layouts, rules, legs = self.layouts, self.rules, self.legs
        local = self._local_parameters()
        scattered = self._seconds(legs.scatter(local))
        in_shard = np.where(layouts.zero == 0, self._seconds(legs.replicated(local)), scattered)
        rounds = self._rounds()
        in_shard = np.where(layouts.zero >= 3, 0.0 if rules.reduce_each_micro_batch else in_shard, in_shard * rounds)
        across = self._seconds(legs.across(local / np.where(layouts.zero > 0, layouts.shard, 1)))
        last = (pipeline["backward"] + pipeline["recompute"]) / layouts.micro_batches * rounds
        wanted = in_shard + across
        exposed = _exposed(wanted, last, rules.overlap_gradients)
        part = exposed / np.maximum(wanted, 1e-30)
        gather = self._seconds([legs.gather(local * rules.gather_bytes)])
        gather = np.where((layouts.zero == 1) | (layouts.zero == 2), gather, 0.0)
        hidden = _exposed(gather, pipeline["forward"] / layouts.micro_batches, rules.overlap_gathers)
        sharded = layouts.zero > 0  # otherwise all that is summed is between ranks that hold the same
        return (
            {
                "shard": np.where(sharded, in_shard * part, 0.0),
                "replicate": np.where(sharded, across, wanted) * part,
            },
            {"shard": hidden + pipeline.pop("zero3"), "replicate": 0.0 * across},
        )

    def _rounds(self) -> Floats:
        """How often in a step the shards sum their gradients."""
        each = (self.layouts.zero >= 2) & self.rules.reduce_each_micro_batch
        return np.where(each, self.layouts.micro_batches, 1)

    def _seconds(self, legs: list[Leg]) -> Floats:
        """Of operations one after the other."""
        if len(legs) == 1:
            return leg_seconds(legs[0], self.network)
        return sum((leg_seconds(leg, self.network) for leg in legs), start=np.zeros(self.layouts.dp.shape))

    def _agree(self, parts: dict[str, Floats]) -> None:
        """Add what the job's way of agreeing takes beside the sums: encoding, meetings of replicas, servers."""
        terms, layouts, rules = self.terms, self.layouts, self.rules
        if terms.plain_sums:
            return
        element = rules.elementwise * terms.wide / self.machine.bandwidth
        if terms.compressed:
            coded = self.legs.coded(self._local_parameters(), self._rounds())
            parts["replicate"] = parts["replicate"] + coded_passes(terms) * element * coded
        rest = sum(parts.values(), start=np.zeros(layouts.dp.shape))
        if terms.apart:
            owned = self._owned()
            met = mean_meeting(self.legs, owned, lambda leg: leg_seconds(leg, self.network), owned * element, rest)
            parts["replicate"] = parts["replicate"] + met
        if terms.servers:
            whole = self._local_parameters()
            found = server_time(
                terms.sync, self.legs.shard, self.network, pull=whole * rules.gather_bytes,
                push=whole * terms.wide, update=parts["optimizer"], compute=rest - parts["optimizer"],
            )  # fmt: skip
            parts["replicate"] = parts["replicate"] + found.exchange
            parts["optimizer"] = found.update

    def _owned(self) -> Floats:
        """Parameters that a rank updates."""
        layouts = self.layouts
        return self._local_parameters() / np.where(layouts.zero >= 1, layouts.shard, 1)

    def _optimizer(self) -> Floats:
        """Clipping and the update: streams through the state of the parameters a rank owns."""
        return self._owned() * self.rules.optimizer_bytes / self.machine.bandwidth


def _exposed(wanted: Floats, cover: Floats, part: float) -> Floats:
    """What is left of ``wanted`` seconds when ``part`` of it may run under ``cover`` seconds."""
    return wanted - np.minimum(part * wanted, cover)


_FILL = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0, "looped-bfs": 1.0,
         "zero-bubble": 1 / 3, "zbv": 0.1, "dualpipev": 1 / 3, "2bw": 0.0}  # fmt: skip
"""Bubble over 1F1B's, at forward = input gradient = weight gradient; loops divide it by the stages a rank."""


def fill_factor(layouts: Layouts) -> Floats:
    """Seconds of the bubble over those of 1F1B's fill and drain."""
    factors = np.array([_FILL[name] for name in SCHEDULES])[layouts.schedule]
    looped = np.isin(layouts.schedule, [SCHEDULES.index(name) for name in ("interleaved", "looped-bfs", "zero-bubble")])
    return factors / np.where(looped, layouts.virtual, 1)
