"""Seconds and bytes of one exchange between data parallel ranks, by the way it goes: closed forms over arrays.

A group has P ranks, g of them on each of N nodes. S bytes are the whole buffer: what all ranks' pieces make together.
Of one round (a reduce-scatter, an all-gather or an all-to-all; an all-reduce is two) a rank sends, and takes in:

                       rounds of messages     inside its node       out of its node (mean over the node's ranks)
    direct             1 of P-1               (g-1)/P S             (N-1)/N S
    ring               P-1                    (P-1)/P S             (P-1)/P S / g
    tree               log2 P                 S                     (N-1)/N S
    halving-doubling   log2 P                 (g-1)/P S             (N-1)/N S
    hierarchical       1 inside, N-1 outside  (g-1)/g S             (N-1)/N S / g
    leaders            1 inside, N-1 outside  (g-1) S, the leader   (N-1)/N S / g

``native`` is what NCCL takes, the quickest of ``collectives``; its bytes are those of the hierarchical form. Seconds
are latencies, bytes inside over the link of a device, and bytes outside over a rank's part of its node's adapters. A
reduce-scatter by tree also sends rows down from the root: two rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshwright.plan.arrays import Bools, Floats, Ints
from meshwright.plan.collectives import Group, Network, all_reduce_seconds, round_seconds

Operation = Literal["reduce_scatter", "all_gather", "all_to_all", "all_reduce"]
MESSAGE_SECONDS = 1e-4
"""What a rank's own program takes for a message, beside the link: posted, waited for."""
ONE_ROUND = 512 * 1024
"""Bytes up to which an all-reduce on CPU sends everything to everybody; ``plan.wire`` has the exact form."""


@dataclass(frozen=True)
class Axis:
    """The groups along one axis, and how far apart in devices their members stand."""

    size: Ints
    stride: Ints
    group: Group

    @classmethod
    def of(cls, size: Ints, stride: Ints, network: Network) -> Axis:
        """Groups of ``size`` devices that stand ``stride`` apart."""
        return cls(size, stride, Group.of(size, stride, network))


@dataclass(frozen=True)
class Leg:
    """One operation of a step."""

    operation: Operation
    payload: Floats
    """Bytes S of the whole buffer."""
    axis: Axis
    way: str
    """``native``, ``fastest`` (of the program's own algorithms), or one of ``WAYS``."""
    calls: Floats | float = 1.0
    """Buffers that it is cut into; with ``one_round`` their size counts."""
    one_round: bool = False
    """A direct all-reduce that is one round while that is small."""
    node_size: int | None = None
    """Consecutive ranks that two-level ways take for a node; None: a node's devices."""


@dataclass(frozen=True)
class Path:
    """What a rank sends in one exchange, and how often it must wait for a link's latency."""

    inside: Floats
    """Bytes inside its node; the busiest rank's."""
    outside: Floats
    """Bytes out of its node."""
    near: Floats
    """Latencies inside a node."""
    far: Floats
    """Latencies between nodes."""
    messages: Floats

    def plus(self, other: Path) -> Path:
        """One after the other."""
        return Path(
            self.inside + other.inside, self.outside + other.outside, self.near + other.near, self.far + other.far,
            self.messages + other.messages,
        )  # fmt: skip

    def times(self, count: Floats | float) -> Path:
        """Several times."""
        return Path(*(np.asarray(value * count) for value in vars(self).values()))


def leg_seconds(leg: Leg, network: Network) -> Floats:
    """Of one operation, nothing else going on; 0 for groups of one rank."""
    if leg.way == "native":
        if leg.operation == "all_reduce":
            return all_reduce_seconds(leg.payload, leg.axis.group, network)
        if leg.operation != "all_to_all":
            return round_seconds(leg.payload, leg.axis.group, network)
    return inside_seconds(leg, network) + outside_seconds(leg, network)


def inside_seconds(leg: Leg, network: Network) -> Floats:
    """Of its bytes and rounds inside nodes."""
    path = path_of(leg, network)
    nodes = leg.axis.group.nodes
    own = np.where(nodes == 1, path.messages * _own(leg), 0.0)
    return _several(leg, path.inside / network.inside_bandwidth + path.near * network.inside_latency + own)


def outside_seconds(leg: Leg, network: Network) -> Floats:
    """Of its bytes and rounds between nodes, all groups of a node at once."""
    path = path_of(leg, network)
    group = leg.axis.group
    own = np.where(group.nodes > 1, path.messages * _own(leg), 0.0)
    return _several(leg, path.outside / _share(group, network) + path.far * network.outside_latency + own)


def leg_bytes(leg: Leg, network: Network) -> tuple[Floats, Floats]:
    """Bytes that one rank sends inside its node and out of it."""
    path = path_of(leg, network)
    return _several(leg, path.inside), _several(leg, path.outside)


def path_of(leg: Leg, network: Network) -> Path:
    """See the module."""
    rounds = 2.0 if leg.operation == "all_reduce" or _whole_sum(leg) else 1.0
    way = leg.way
    if way == "fastest":
        return _fastest(leg, network)
    if way == "native":
        way = "direct" if leg.operation == "all_to_all" else "hierarchical"
    path = WAYS[way](leg.payload, leg.axis, network, leg.node_size).times(rounds)
    if leg.one_round and leg.operation == "all_reduce":
        others = leg.axis.size - 1
        small = others * leg.payload <= ONE_ROUND * leg.calls
        once = WAYS[way](leg.payload * leg.axis.size, leg.axis, network, None)
        path = Path(
            *(np.where(small, one, two) for one, two in zip(vars(once).values(), vars(path).values(), strict=True))
        )
    return path


def _whole_sum(leg: Leg) -> bool:
    """A reduce-scatter that sums everything on the way: by tree, and the one of Gloo itself."""
    return leg.operation == "reduce_scatter" and leg.way in ("tree", "backend")


def _own(leg: Leg) -> float:
    return 0.0 if leg.way == "native" else MESSAGE_SECONDS


def _several(leg: Leg, value: Floats) -> Floats:
    return np.asarray(np.where(leg.axis.size > 1, value, 0.0))


def _share(group: Group, network: Network) -> Floats:
    """Bytes/s between nodes of one rank, when all ranks of its node send."""
    whole = group.share >= network.node_bandwidth
    return np.where(whole, group.share / group.inside, group.share)


def _one(mask: Bools) -> Floats:
    """1 where it holds, else 0."""
    return np.asarray(mask, np.float64)


# -- one round ----------------------------------------------------------------------------------------


def _direct(payload: Floats, axis: Axis, network: Network, node_size: int | None) -> Path:
    group = axis.group
    crosses = _one(group.nodes > 1)
    return Path(
        inside=(group.inside - 1) / group.size * payload,
        outside=(group.nodes - 1) / group.nodes * payload,
        near=1.0 - crosses,
        far=crosses,
        messages=group.size - 1,
    )


def _ring(payload: Floats, axis: Axis, network: Network, node_size: int | None) -> Path:
    group = axis.group
    crosses = _one(group.nodes > 1)
    sent, steps = (group.size - 1) / group.size * payload, group.size - 1
    alone = _one(group.inside == 1)
    return Path((1 - alone) * sent, crosses * sent / group.inside, (1 - crosses) * steps, crosses * steps, steps)


def _tree(payload: Floats, axis: Axis, network: Network, node_size: int | None) -> Path:
    group = axis.group
    crosses = _one(group.nodes > 1)
    levels = np.ceil(np.log2(np.maximum(group.size, 1)))
    alone, across = _one(group.inside == 1), (group.nodes - 1) / group.nodes * payload
    return Path((1 - alone) * payload, across, (1 - crosses) * levels, crosses * levels, levels)


def _halving(payload: Floats, axis: Axis, network: Network, node_size: int | None) -> Path:
    levels = np.ceil(np.log2(np.maximum(axis.group.size, 1)))
    crosses = _one(axis.group.nodes > 1)
    path = _direct(payload, axis, network, node_size)
    return Path(path.inside, path.outside, (1 - crosses) * levels, crosses * levels, levels)


def levels_of(axis: Axis, network: Network, node_size: int | None) -> tuple[Axis, Axis]:
    """The members that share a node, and one member of each node, as axes of their own."""
    node = network.devices_per_node if node_size is None else np.asarray(node_size)
    inside = np.clip(node // np.maximum(axis.stride, 1), 1, axis.size)
    return Axis.of(inside, axis.stride, network), Axis.of(-(-axis.size // inside), axis.stride * inside, network)


def _hierarchical(payload: Floats, axis: Axis, network: Network, node_size: int | None) -> Path:
    inner, outer = levels_of(axis, network, node_size)
    near = _alone(inner, _direct(payload, inner, network, None))
    return near.plus(_alone(outer, _ring(payload / inner.size, outer, network, None)))


def _leaders(payload: Floats, axis: Axis, network: Network, node_size: int | None) -> Path:
    inner, outer = levels_of(axis, network, node_size)
    near = _alone(inner, _direct(payload * inner.size, inner, network, None))
    # Leaders alone have all of their node's adapters, which is what its ranks have together.
    return near.plus(_alone(outer, _ring(payload / inner.size, outer, network, None)))


def _alone(axis: Axis, path: Path) -> Path:
    """Nothing, for groups of one rank."""
    return path.times(_one(axis.size > 1))


_Way = Callable[[Floats, Axis, Network, "int | None"], Path]
WAYS: dict[str, _Way] = {
    "direct": _direct,
    "ring": _ring,
    "tree": _tree,
    "halving-doubling": _halving,
    "hierarchical": _hierarchical,
    "leaders": _leaders,
    "ordered": _direct,
    "backend": _ring,
}
CHOICES: tuple[str, ...] = ("direct", "ring", "tree", "halving-doubling", "hierarchical", "leaders")
"""What ``sync.algorithm = "auto"`` chooses among by the links, where it knows them."""


def _fastest(leg: Leg, network: Network) -> Path:
    """The path of the quickest of ``CHOICES`` for each layout; inside one node the direct one."""
    legs = [Leg(leg.operation, leg.payload, leg.axis, way) for way in CHOICES]
    taken = [leg_seconds(one, network) for one in legs]
    which = np.where(leg.axis.group.nodes > 1, np.argmin(np.stack(np.broadcast_arrays(*taken)), axis=0), 0)
    return _chosen(which, [path_of(one, network) for one in legs])


def _chosen(which: Ints, paths: Sequence[Path]) -> Path:
    columns = zip(*(vars(path).values() for path in paths), strict=True)
    return Path(*(np.choose(which, np.broadcast_arrays(which * 1.0, *column)[1:]) for column in columns))
