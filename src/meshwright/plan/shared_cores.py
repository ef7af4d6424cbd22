"""Seconds of a step where ranks are processes that share a node's processor cores.

What differs from devices of their own (``array_time``):

* beside matrix products and attention, every streamed element, layer, logit, parameter and micro-batch has a measured
  price (``job/host.py``);
* collectives take what they were measured to take, by group size and number of groups at work; their bytes are copied
  by the same cores, so they hide nothing unless cores are idle. Between nodes, where nothing was measured, the links'
  closed form (``exchange``) comes on top;
* ranks beyond the cores take turns. A pipeline then loses nothing to its bubble as long as there is other work for the
  cores: the step is the node's whole work over its cores, and what stands idle while it fills and drains.

With ``c`` cores, ``n`` ranks a node of which ``g = n / pp`` run the same stage, and ``W_r`` seconds of a core that
pipeline rank ``r`` takes for a step (what the others slow it down included, waiting for its turn not):

    own cores (n <= c)   max_r W_r + fill
    shared (n > c)       (g sum_r W_r + idle) / c, and no less than on own cores
    idle                 sum over k < pp of max(0, c - k g), times a stage's forward and backward of one micro-batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.job.cluster import ClusterSpec, Level
from meshwright.job.host import Host, PassSeconds
from meshwright.job.layout import SPLIT_BACKWARD_SCHEDULES
from meshwright.plan.array_time import Machine, StepTime, fill_factor, layer_time, stream_elements
from meshwright.plan.arrays import RECOMPUTES, SCHEDULES, Floats, Ints, Layouts, axis_strides
from meshwright.plan.collectives import Network, send_seconds
from meshwright.plan.exchange import Axis, Leg, Operation, outside_seconds
from meshwright.plan.measured import MeasuredCollectives
from meshwright.plan.rules import Rules
from meshwright.plan.server_time import server_time
from meshwright.plan.shape import Shape, Value
from meshwright.plan.stages import Held, held, is_delayed, rank_parameters
from meshwright.plan.sync_legs import Legs, SyncTerms, coded_passes, mean_meeting

_FULL, _SELECTIVE = RECOMPUTES.index("full"), RECOMPUTES.index("selective")
_SPLIT = [SCHEDULES.index(name) for name in SCHEDULES if name in SPLIT_BACKWARD_SCHEDULES]
_NUMBER_BYTES = 8.0
"""Of the numbers that ranks agree on."""


def shared_step_time(shape: Shape, layouts: Layouts, cluster: ClusterSpec, machine: Machine, rules: Rules,
                     terms: SyncTerms) -> StepTime:  # fmt: skip
    """The whole step by part, on a cluster with a ``host``.

    Args:
        shape: sizes of the model.
        layouts: columns.
        cluster: with ``host``.
        machine: rates of a rank alone on the node.
        rules: of the program.
        terms: how the data parallel ranks agree.
    """
    assert cluster.host is not None
    return _Step(shape, layouts, cluster, cluster.host, machine, rules, terms).result()


@dataclass(frozen=True)
class _Work:
    """Seconds of one micro-batch on one pipeline rank, alone on the node."""

    forward: Floats
    backward: Floats
    recompute: Floats
    tensor: Floats
    """Of its tensor-parallel collectives, as long as they take when all ranks do theirs."""

    @property
    def compute(self) -> Floats:
        return self.forward + self.backward + self.recompute


class _Step:
    """One call of :func:`shared_step_time`, its common quantities named once."""

    def __init__(
        self, shape: Shape, layouts: Layouts, cluster: ClusterSpec, host: Host, machine: Machine, rules: Rules,
        terms: SyncTerms,
    ) -> None:  # fmt: skip
        self.shape, self.layouts, self.host, self.rules = shape, layouts, host, rules
        self.pure = replace(machine, launch=0.0, dispatch=0.0, bandwidth=np.inf)
        """Matrix products and attention alone."""
        self.element = machine.element
        self.rows: Floats = np.asarray(layouts.micro_batch * shape.sequence, float)
        self.m: Floats = layouts.micro_batches.astype(np.float64)
        self.here: Floats = np.minimum(layouts.ranks, cluster.devices_per_node).astype(np.float64)
        """Ranks on a node."""
        self.dearer = _dearer(cluster, self.here)
        self.idle_cores = np.clip(host.cores / self.here - 1, 0, 1)
        """How much of the communication has a core to itself."""
        self.measured, self.one_node = MeasuredCollectives(cluster), cluster.nodes == 1
        self.network = Network.of(cluster)
        self.strides = axis_strides(layouts)
        self.tensor_axis = Axis.of(layouts.tp, self.strides["tp"], self.network)
        self.terms = terms
        self.ranks = held(layouts, shape.layers)
        self.legs = Legs(terms, shape, layouts, self.network, self.ranks, self.strides)
        self.splits = np.isin(layouts.schedule, _SPLIT) & (layouts.pp > 1)

    def seconds(self, operation: Operation, axis: Axis, payload: Value) -> Floats:
        """Of one call by all groups of an axis at once.

        Between nodes: as measured there; where nothing was, what the node's cores do, and then what the links take.

        Args:
            operation: which.
            axis: its groups.
            payload: bytes each rank hands to it, as a cluster file counts them.
        """
        near = self._measured(operation, "intra", axis.size, payload)
        if self.one_node:
            return near
        crosses = axis.group.nodes > 1
        if self.measured.has("inter"):
            return np.where(crosses, self._measured(operation, "inter", axis.size, payload), near)
        whole = np.asarray(payload * (axis.size if operation == "all_gather" else 1.0), float)
        return near + np.where(crosses, outside_seconds(Leg(operation, whole, axis, "direct"), self.network), 0.0)

    def _measured(self, operation: str, level: Level, size: Ints, payload: Value) -> Floats:
        groups = np.maximum(1, self.here // np.maximum(size, 1))
        return self.measured.seconds(operation, level, size, groups, payload)

    def _send(self, payload: Value) -> Floats:
        """A message to the next pipeline rank."""
        near = self._measured("send", "intra", np.asarray(2), payload)
        if self.one_node:
            return near
        crosses = self.strides["pp"] >= self.network.devices_per_node
        if self.measured.has("inter"):
            return np.where(crosses, self._measured("send", "inter", np.asarray(2), payload), near)
        far = send_seconds(np.asarray(payload, float), self.strides["pp"], self.network, False, self.layouts.tp)
        return near + np.where(crosses, far, 0.0)

    def leg_seconds(self, leg: Leg, calls: Floats) -> Floats:
        """Of an operation in ``calls`` parts. Ranks copy as in the direct exchange; other ways differ on the links."""
        part = leg.payload / calls
        split = {"all_reduce": ("reduce_scatter", "all_gather"), "all_to_all": ("reduce_scatter",)}
        steps: tuple[Operation, ...] = split.get(leg.operation, (leg.operation,))  # type: ignore[assignment]
        axis = leg.axis
        sizes = {name: part / axis.size if name == "all_gather" else part for name in steps}
        if self.one_node or (leg.way == "direct" and self.measured.has("inter")):
            return calls * sum(self.seconds(name, axis, size) for name, size in sizes.items())
        near = sum(self._measured(name, "intra", axis.size, size) for name, size in sizes.items())
        one = replace(leg, payload=part, calls=leg.calls / calls)
        return calls * (near + np.where(axis.group.nodes > 1, outside_seconds(one, self.network), 0.0))

    def result(self) -> StepTime:
        layouts, host = self.layouts, self.host
        works = [self._work(rank) for rank in self.ranks]
        pipeline = self._pipeline(works)
        gradients, gathers, hooks = self._data_parallel()
        owned = self.parameters / np.where(layouts.zero >= 1, layouts.shard, 1)
        cover = (1 - self.idle_cores) if self.rules.overlap_gradients else 1.0
        # Idle cores hide no more than the computation lasts.
        backward = (pipeline["backward"] + pipeline["recompute"]) * np.where(layouts.zero >= 2, 1.0, 1.0 / self.m)
        exchanged = np.where(layouts.zero > 0, gradients + gathers, gradients)
        beside = backward + np.where(layouts.zero > 0, pipeline["forward"], 0.0)
        exposed = np.maximum(exchanged * cover, exchanged - beside)
        dp, world = layouts.dp, layouts.ranks
        every = Axis.of(world, np.ones_like(world), self.network)
        replicas = Axis.of(dp, self.strides["shard"], self.network)
        agreed = self.seconds("all_reduce", every, _NUMBER_BYTES * (2 + dp * self.m))
        counted = self.seconds("all_reduce", replicas, _NUMBER_BYTES)
        tail = host.step * self.dearer + np.where(world > 1, agreed, 0.0) + np.where(dp > 1, counted, 0.0)
        parts = {
            **pipeline,
            "optimizer": owned * host.update * self.dearer,
            "shard": np.where(layouts.zero > 0, exposed + hooks * self.dearer, 0.0),
            "replicate": np.where(layouts.zero == 0, exposed, self._across_copies()),
            "other": tail,
            "waiting": 0.0 * self.m,
        }
        self._agree(parts)
        shaped = {name: np.asarray(np.broadcast_to(part, self.rows.shape), float) for name, part in parts.items()}
        return StepTime(shaped, np.add.reduce(list(shaped.values())))

    # -- one micro-batch on one pipeline rank ----------------------------------------------------------

    def _work(self, rank: Held) -> _Work:
        shape, layouts, host = self.shape, self.layouts, self.host
        tp, vocabulary = layouts.tp, shape.vocabulary / layouts.tp
        parallel = layouts.sequence_parallel.astype(float)
        layer = layer_time(shape, tp, layouts.micro_batch, parallel, self.pure, self.rules)
        local = np.where(parallel > 0, 1 / tp, 1.0)
        elements = self.rows * stream_elements(
            shape, self.rules, shape.hidden * local, shape.query / tp, shape.key_value / tp, shape.ffn / tp
        )
        one, back = _layer_pass(host.forward, elements), _layer_pass(host.backward, elements)
        policy = layouts.recompute
        again = np.where(policy == _FULL, layer.forward + one, np.where(policy == _SELECTIVE, layer.core, 0.0))
        logits = rank.head * self.rows * vocabulary
        head = rank.head * self.pure.product(self.rows, shape.hidden, vocabulary)
        head_back = rank.head * (
            self.pure.product(self.rows, vocabulary, shape.hidden)
            + self.pure.product(shape.hidden, self.rows, vocabulary)
        )
        own = rank_parameters(self.shape, self.layouts, rank)
        stages = layouts.virtual.astype(float)
        return _Work(
            forward=rank.layers * (layer.forward + one) + head + logits * host.forward.logit
            + stages * host.forward.micro_batch + own * host.forward.parameter,
            backward=rank.layers * (layer.backward + back) + head_back + logits * host.backward.logit
            + stages * host.backward.micro_batch + own * host.backward.parameter,
            recompute=rank.layers * again,
            tensor=self._tensor(rank),
        )  # fmt: skip

    @property
    def parameters(self) -> Floats:
        """Of the pipeline rank that holds most."""
        return np.asarray(np.maximum.reduce([rank_parameters(self.shape, self.layouts, rank) for rank in self.ranks]))

    def _tensor(self, rank: Held) -> Floats:
        """The collectives of one micro-batch along tp, by ``parallel/tensor.py``'s table."""
        layouts, layers = self.layouts, rank.layers
        tp, first, last = layouts.tp, 1.0 * rank.embedding, 1.0 * rank.head
        whole = self.rows * self.shape.hidden * self.element
        gather = self.seconds("all_gather", self.tensor_axis, whole / tp)
        scatter = self.seconds("reduce_scatter", self.tensor_axis, whole)
        again = np.where(layouts.recompute == _FULL, layers, 0.0)
        gathers = 6 * layers + 2 * last + first + 2 * again + 2 * np.where(self.splits, layers, 0.0)
        scatters = 4 * layers + last + first + again
        wide = max(4.0, self.element)
        loss = self.seconds("all_reduce", self.tensor_axis, wide * self.rows)
        loss = loss + self.seconds("all_reduce", self.tensor_axis, 2 * wide * self.rows)
        hidden = 1 - self.idle_cores * self.rules.overlap_tensor
        around = (gathers + scatters) * self.host.tensor * self.dearer
        return np.where(tp > 1, (gathers * gather + scatters * scatter) * hidden + last * loss + around, 0.0)

    # -- the pipeline -----------------------------------------------------------------------------------

    def _pipeline(self, works: list[_Work]) -> dict[str, Floats]:
        """From the first forward to the last backward, by part."""
        layouts, m, cores = self.layouts, self.m, float(self.host.cores)
        turns = np.maximum(1.0, self.here / cores)
        send = self._send(self.rows * self.shape.hidden * self.element)
        # By pipeline rank and part: seconds of a core for one micro-batch, what others slow down included. All ranks
        # did the measured collectives at once, so on shared cores their seconds hold several ranks' work.
        rows = [
            np.stack(
                [
                    work.forward * self.dearer / turns,
                    work.backward * self.dearer / turns,
                    work.recompute * self.dearer / turns,
                    work.tensor / turns,
                    self._sends(which) * send / turns,
                ]
            )
            for which, work in enumerate(works)
        ]
        whole = np.stack([row.sum(0) for row in rows])
        middle = np.maximum(layouts.pp - 2, 0)
        total = whole[0] + middle * whole[1] + np.where(layouts.pp > 1, whole[2], 0.0)
        slowest, which = whole.max(0), whole.argmax(0)
        step = m * slowest + (total - slowest) * fill_factor(layouts)
        group = self.here / np.minimum(layouts.pp, self.here)
        idle = np.where(is_delayed(layouts), 0.0, self._idle(group))
        shared = (group * m * total + idle * total / layouts.pp) / cores
        step = np.where(self.here > cores, np.maximum(step, shared), step)
        parts = m * np.choose(which, rows) * np.minimum(turns, step / (m * slowest))
        names = ("forward", "backward", "recompute", "tp", "pp")
        return {**dict(zip(names, parts, strict=True)), "bubble": np.maximum(step - parts.sum(0), 0.0)}

    def _idle(self, group: Floats) -> Floats:
        """Cores without a rank while a pipeline fills and drains, in passes of a stage (there and back)."""
        pp, cores = self.layouts.pp, float(self.host.cores)
        deepest = int(np.max(pp, initial=1))
        return sum(
            (np.where(stage < pp, np.maximum(0.0, cores - stage * group), 0.0) for stage in range(1, deepest)),
            start=np.zeros(pp.shape),
        )

    def _sends(self, which: int) -> Floats:
        """Boundaries that the first, a middle or the last pipeline rank has with others.

        A micro-batch crosses each twice, and half of either message travels while something else is computed.
        """
        layouts = self.layouts
        return np.where(layouts.pp > 1, 2.0 * layouts.virtual - (0.0 if which == 1 else 1.0), 0.0)

    # -- data parallel ----------------------------------------------------------------------------------

    def _data_parallel(self) -> tuple[Floats, Floats, Floats]:
        """Reduction of gradients, gathers of parameters, and the hooks of ZeRO-2 and 3, in one step."""
        layouts, rules, m = self.layouts, self.rules, self.m
        payload, gathered = self.parameters * rules.wire_bytes, self.parameters * rules.gather_bytes
        buckets = np.maximum(1.0, np.ceil(payload / self.terms.bucket_bytes))
        layers = np.maximum.reduce([rank.layers for rank in self.ranks])
        units = layers + layouts.virtual
        grouped = layouts.zero >= 2
        calls = np.where(grouped, units, buckets)
        same = self._all(self.legs.replicated(self.parameters), calls)
        summed = self._all(self.legs.scatter(self.parameters), calls) * np.where(grouped, m, 1.0)
        gradients = np.where(layouts.zero == 0, same, summed)
        gather = self.leg_seconds(self.legs.gather(gathered), calls)
        # ZeRO-3 keeps the last block of a model without pipeline, and what is in no block, from forward to backward.
        twice = np.where(layouts.pp == 1, 2 * layers / units, 2.0)
        gathers = np.where(layouts.zero == 0, 0.0, gather) * np.where(layouts.zero == 3, m * twice, 1.0)
        each = units * self.host.unit + self.parameters * self.host.sharded
        hooks = np.where(grouped, each * m * np.where(layouts.zero == 3, 3.0, 1.0 + 1.0 / m), 0.0)
        alone = self.legs.shard.size == 1
        return np.where(alone, 0.0, gradients), np.where(alone, 0.0, gathers), np.where(alone, 0.0, hooks)

    def _across_copies(self) -> Floats:
        """ZeRO with replicas: the shards' gradients are summed across them once a step."""
        return self._all(self.legs.across(self.parameters / self.layouts.shard), np.ones_like(self.m))

    def _all(self, legs: Sequence[Leg], calls: Floats) -> Floats:
        """Operations one after the other."""
        found = sum((self.leg_seconds(leg, calls) for leg in legs), start=np.zeros(self.m.shape))
        return np.where(legs[0].axis.size > 1, found, 0.0) if legs else found

    def _agree(self, parts: dict[str, Floats]) -> None:
        """Add what the job's way of agreeing takes beside the sums: encoding, meetings of replicas, servers."""
        terms, layouts = self.terms, self.layouts
        if terms.plain_sums:
            return
        element = self.host.forward.element * self.dearer
        if terms.compressed:
            rounds = np.where(layouts.zero >= 2, self.m, 1.0)
            coded = self.legs.coded(self.parameters, rounds)
            parts["replicate"] = parts["replicate"] + coded_passes(terms) * element * coded
        rest = np.add.reduce([np.broadcast_to(part, self.rows.shape) for part in parts.values()])
        if terms.apart:
            owned = self.parameters / np.where(layouts.zero >= 1, layouts.shard, 1)
            once = np.ones_like(self.m)
            met = mean_meeting(self.legs, owned, lambda leg: self.leg_seconds(leg, once), owned * element, rest)
            parts["replicate"] = parts["replicate"] + met
        if terms.servers:
            found = server_time(
                terms.sync, self.legs.shard, self.network, pull=self.parameters * self.rules.gather_bytes,
                push=self.parameters * terms.wide, update=parts["optimizer"], compute=rest - parts["optimizer"],
            )  # fmt: skip
            parts["replicate"] = parts["replicate"] + found.exchange
            parts["optimizer"] = found.update


def _layer_pass(seconds: PassSeconds, elements: Floats) -> Floats:
    """One layer's pass beside its products and attention."""
    return seconds.layer + seconds.element * elements


def _dearer(cluster: ClusterSpec, ranks: Floats) -> Floats:
    """How many times longer work takes when that many ranks run at once on a node; taking turns counts."""
    assert cluster.host is not None
    known = {1: 1.0, **cluster.contention}
    counts = sorted(known)
    inside = np.interp(ranks, counts, [known[count] for count in counts])
    most, cores = counts[-1], cluster.host.cores
    turns = np.maximum(1.0, ranks / cores) / max(1.0, most / cores)
    return np.where(ranks > most, known[most] * turns, inside)
