"""What a job's [sync] makes of a step's data parallel traffic, as operations on axes: for many layouts at once.

n elements of a rank's gradients in w bytes, C bytes of one of them encoded:

    plain            shards: a reduce-scatter of w n; copies: an all-reduce; by ``sync.algorithm``
    two stages       shards: an all-to-all of C n; copies: that, and an all-gather of C n
    dgc              an all-gather of P (4 + w) (1 - sparsity) n
    powersgd         two all-reduces in rank order of w n times what ``low_rank`` leaves
    slow, zero=0     a node's ranks are the shards; then copies are one rank of each node, and rows are gathered whole
    apart            the same inside a replica; now and then the replicas' ``meetings``

Warm-ups are over, as in ``compressed``, which has the exact form of one layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.job.cluster import ClusterSpec
from meshwright.job.sync_keys import CASTS, REPLICA_STRATEGIES
from meshwright.job.sync_section import SyncSection
from meshwright.plan.arrays import Floats, Ints, Layouts, Work, axis_strides
from meshwright.plan.collectives import Network
from meshwright.plan.exchange import Axis, Leg, Operation, levels_of
from meshwright.plan.low_rank import low_rank_parts
from meshwright.plan.rules import Rules
from meshwright.plan.shape import Shape, Value
from meshwright.plan.stages import Held

_INDEX_BYTES = 4


@dataclass(frozen=True)
class SyncTerms:
    """What of a job and a cluster decides how data parallel ranks agree, whatever the layout."""

    sync: SyncSection
    cpu: bool
    """Ranks are processes on CPU, whose own exchanges are direct; otherwise NCCL's."""
    chooses: bool
    """``sync.algorithm = "auto"`` takes the quickest by the links, as training does on measured machines."""
    wide: Value
    """Bytes of a gradient element."""
    moments: int
    """Numbers that the optimizer keeps for each element."""
    bucket_bytes: float

    @classmethod
    def plain(cls, rules: Rules) -> SyncTerms:
        """Gradients summed whole in every step, on NCCL."""
        return cls(SyncSection(), cpu=False, chooses=False, wide=rules.wire_bytes, moments=0, bucket_bytes=1.0)

    @classmethod
    def of(cls, work: Work, cluster: ClusterSpec, rules: Rules) -> SyncTerms:
        """A job's work on a cluster, under the rules of its program."""
        cpu = work.cpu or cluster.host is not None
        return cls(
            sync=work.sync,
            cpu=cpu,
            chooses=cluster.host is not None and cluster.nodes > 1 and work.sync.strategy == "all-reduce",
            wide=rules.wire_bytes,
            moments=2 if work.optimizer == "adamw" else int(work.momentum > 0),
            bucket_bytes=float(work.bucket_bytes),
        )

    @property
    def apart(self) -> bool:
        """Replicas train apart."""
        return self.sync.strategy in REPLICA_STRATEGIES

    @property
    def servers(self) -> bool:
        """Servers sum."""
        return self.sync.strategy == "server"

    @property
    def plain_sums(self) -> bool:
        """Gradients are summed whole, in every step, by the ranks themselves."""
        return not (self.apart or self.servers or self.compressed)

    @property
    def compressed(self) -> bool:
        """Gradients travel compressed."""
        return self.sync.compression != "none" and not self.apart

    @property
    def base(self) -> str:
        """The way of what is no gradient sum."""
        return "direct" if self.cpu else "native"

    @property
    def way(self) -> str:
        """The way of plain gradient sums."""
        name = self.sync.algorithm
        if name == "auto" and self.chooses:
            return "fastest"
        return self.base if name in ("auto", "direct") or (name == "backend" and not self.cpu) else name

    def encoded(self) -> Value:
        """Bytes C of one element that travels in two stages."""
        sync, scale = self.sync, self.wide / self.sync.compression_block
        if sync.compression in CASTS:
            return 2.0
        if sync.compression in ("int8", "fp8"):
            return 1.0 + scale
        return (sync.compression_bits if sync.compression == "qsgd" else 1) / 8 + scale


class Legs:
    """The operations of a step's data parallel traffic.

    Args:
        terms: of the job and the cluster.
        shape: sizes of the model.
        layouts: columns.
        network: links.
        ranks: what pipeline ranks hold.
        strides: by axis, where ``axis_strides`` has been computed already.

    Attributes:
        shard: ranks that divide one copy of the state (``zero=0``: that hold the same).
        copy: copies of a shard, or where replicas train apart, the replicas.
    """

    def __init__(
        self, terms: SyncTerms, shape: Shape, layouts: Layouts, network: Network, ranks: tuple[Held, Held, Held],
        strides: Mapping[str, Ints] | None = None,
    ) -> None:  # fmt: skip
        self.terms, self._shape, self._layouts, self._network, self._ranks = terms, shape, layouts, network, ranks
        strides = strides or axis_strides(layouts)
        if not terms.apart:
            self.shard = Axis.of(layouts.shard, strides["shard"], network)
            self.copy = Axis.of(layouts.replicas, strides["replicate"], network)
            return
        # With zero=0 and no shard every rank is a replica of its own.
        single = (layouts.zero == 0) & (layouts.shard == layouts.dp)
        inside = np.where(single, 1, layouts.shard)
        self.shard = Axis.of(inside, strides["shard"], network)
        apart = np.where(single, strides["shard"], strides["replicate"])
        self.copy = Axis.of(layouts.dp // inside, apart, network)

    def scatter(self, elements: Floats) -> list[Leg]:
        """The sum over shards of ``elements`` gradients, of which each keeps its part."""
        terms = self.terms
        if terms.servers:
            return []
        if terms.compressed and terms.sync.compression_level == "all":
            return self._compressed(elements, self.shard, whole=False)
        return [self._leg("reduce_scatter", terms.wide * elements, self.shard, terms.way)]

    def replicated(self, elements: Floats) -> list[Leg]:
        """The sum over ranks that hold the same state (``zero=0``)."""
        terms = self.terms
        if terms.servers:
            return []
        if not terms.compressed:
            return [self._leg("all_reduce", terms.wide * elements, self.shard, terms.way)]
        if terms.sync.compression_level == "all" or terms.sync.node_size is None:
            return self._compressed(elements, self.shard, whole=True)
        inner, outer = levels_of(self.shard, self._network, terms.sync.node_size)
        return [
            self._leg("reduce_scatter", terms.wide * elements, inner, terms.base),
            *self._compressed(elements / inner.size, outer, whole=True),
            self._leg("all_gather", terms.wide * elements, inner, terms.base),
        ]

    def across(self, elements: Floats) -> list[Leg]:
        """The sum of a shard's ``elements`` over its copies."""
        terms = self.terms
        if terms.servers or terms.apart:
            return []
        if terms.compressed:
            return self._compressed(elements, self.copy, whole=True)
        return [self._leg("all_reduce", terms.wide * elements, self.copy, terms.way)]

    def gather(self, payload: Floats) -> Leg:
        """The shards' parts of ``payload`` bytes of parameters, to each of them."""
        return self._leg("all_gather", payload, self.shard, self.terms.base)

    def coded(self, elements: Floats, rounds: Floats | Ints) -> Floats:
        """Elements that a rank encodes in a step, of ``elements`` gradients that its shards sum ``rounds`` times."""
        layouts, terms = self._layouts, self.terms
        if terms.sync.compression_level == "all":
            first = np.where(self.shard.size > 1, elements * rounds, 0.0)
            return first + np.where(self.copy.size > 1, elements / self.shard.size, 0.0)
        inner = self.shard.size
        if terms.sync.node_size is not None:
            node = levels_of(self.shard, self._network, terms.sync.node_size)[0].size
            inner = np.where(layouts.zero == 0, node, inner)
        return np.asarray(elements / inner, float)

    def _leg(self, operation: Operation, payload: Floats, axis: Axis, way: str) -> Leg:
        return Leg(operation, payload, axis, way, node_size=self.terms.sync.node_size)

    def _compressed(self, elements: Floats, axis: Axis, *, whole: bool) -> list[Leg]:
        """Args: ``whole``: every rank needs the sum."""
        terms, kind = self.terms, self.terms.sync.compression
        if kind == "dgc":
            each = (_INDEX_BYTES + terms.wide) * (1.0 - terms.sync.compression_sparsity) * elements
            return [self._leg("all_gather", axis.size * each, axis, terms.base)]
        if kind == "powersgd":
            grouped = (self._layouts.zero >= 2) & (self._layouts.shard > 1)
            parts = np.where(grouped, self._layouts.shard, 1)
            shares = low_rank_parts(self._shape, self._layouts, terms.sync, self._ranks, parts)
            return [self._in_rank_order(terms.wide * elements * share, axis, elements) for share in shares]
        small = terms.encoded() * elements
        legs = [self._leg("all_to_all", small, axis, terms.base)]
        return [*legs, self._leg("all_gather", small, axis, terms.base)] if whole else legs

    def _in_rank_order(self, payload: Floats, axis: Axis, elements: Floats) -> Leg:
        """A sum in rank order: on NCCL everything is gathered, and added by everyone."""
        if not self.terms.cpu:
            return self._leg("all_gather", axis.size * payload, axis, "native")
        buckets = np.maximum(1.0, np.ceil(self.terms.wide * elements / self.terms.bucket_bytes))
        groups = 1.0 + np.maximum.reduce([rank.layers for rank in self._ranks])
        calls = np.where(self._layouts.zero >= 2, groups, buckets)
        return replace(self._leg("all_reduce", payload, axis, "direct"), calls=calls, one_round=True)

    # -- replicas that train apart --------------------------------------------------------------------

    def meetings(self, owned: Floats) -> list[tuple[float, list[Leg]]]:
        """What replicas send when they meet, and how many such meetings a step has in the mean.

        Args:
            owned: elements that a rank updates.
        """
        sync, terms = self.terms.sync, self.terms
        if not terms.apart:
            return []
        elements = owned * (1 + terms.moments if sync.strategy == "local" and sync.average == "state" else 1)
        elements, whole = elements / sync.fragments, sync.fragments / sync.period
        found = [(whole, self._met(elements, self.copy))]
        if sync.strategy == "local" and sync.group_size is not None and sync.group_period is not None:
            near = Axis.of(np.minimum(sync.group_size, self.copy.size), self.copy.stride, self._network)
            found.append((1.0 / sync.group_period - whole, self._met(elements, near)))
        return found

    def _met(self, elements: Floats, axis: Axis) -> list[Leg]:
        if self.terms.sync.compression != "none":
            return self._compressed(elements, axis, whole=True)
        return [self._in_rank_order(self.terms.wide * elements, axis, elements)]


def mean_meeting(
    legs: Legs, owned: Floats, seconds: Callable[[Leg], Floats], passes: Floats, rest: Floats
) -> Floats:
    """Seconds that meetings add to a step in the mean.

    Args:
        legs: of the layouts.
        owned: elements that a rank updates.
        seconds: of one operation.
        passes: seconds of reading every such element once.
        rest: seconds of a step without a meeting, under ``overlap`` of which a meeting's sum may travel.
    """
    total, hidden = 0.0 * rest, legs.terms.sync.overlap * rest
    for often, met in legs.meetings(owned):
        exposed = np.maximum(np.add.reduce([seconds(leg) for leg in met]) - hidden, 0.0)
        work = met_passes(legs.terms) * passes / legs.terms.sync.fragments
        total = total + often * np.where(met[0].axis.size > 1, exposed + work, 0.0)
    return total


# -- memory ------------------------------------------------------------------------------------------

_CODING = {"fp16": 3.0, "bf16": 3.0, "powersgd": 8.0, "dgc": 8.0, "one-bit-adam": 9.0, "zero-one-adam": 9.0}
"""Times that a rank reads or writes each element to encode and decode a whole sum; others: ``_CODED``. Casts read, add
the residual's and write back; PowerSGD reads a matrix for P, for Q and for the residual, and writes both; DGC reads and
writes velocity and residual, looks for the largest and clears them."""
_CODED = 7.0
"""With scales: residual read and written, the largest of each block, the code, and the sum decoded."""
_MET = 6.0
"""At a meeting: copied out, the shared model subtracted, moved with its momentum, copied back."""


def coded_passes(terms: SyncTerms) -> float:
    """Reads and writes of an element for encoding and decoding; 0 where nothing is compressed."""
    if terms.sync.compression == "none" or terms.servers:
        return 0.0
    return _CODING.get(terms.sync.compression, _CODED)


def met_passes(terms: SyncTerms) -> float:
    """Reads and writes of an element at a meeting."""
    return _MET + coded_passes(terms) if terms.apart else 0.0
