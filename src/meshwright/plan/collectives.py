"""Seconds of a collective: alpha-beta of each algorithm on each kind of link, the quickest taken.

``n`` ranks in ``N`` nodes (``g = n / N`` in each), ``S`` the whole payload in bytes, ``a`` latency of a step and ``B``
bandwidth, inside a node (i) and between nodes (e). ``B_e`` is what a group has of its node's adapters, while the
other devices of the node do the same in groups of their own: all of them where the group is the whole node, and one
device's share otherwise, since a ring comes in through one adapter and goes out through another (twice that share
for two members in the node, as one might think, contradicts the measured runs of Megatron with tp = 2 and 4).

    ring            (n - N) a_i + N a_e per round of n - 1 steps,   (n-1)/n S / min(B_i, B_e)
    hierarchical    inside, then N nodes on S/g each, then inside:  (g-1)/g S/B_i + (N-1)/N S/B_e
    tree            2 (ceil(log2 g) a_i + ceil(log2 N) a_e),        2 S / min(B_i, B_e)   all-reduce only
    in the switch   2 a_i,                                          S / B_i               inside a node only

One round is a reduce-scatter or an all-gather; an all-reduce is two. Patarasuk and Yuan 2009; Thakur et al. 2005;
NCCL's ``src/graph/tuning.cc`` takes the quickest in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.job.cluster import ClusterSpec
from meshwright.plan.arrays import Floats, Ints

_NO_LINK = 1e30
"""Bytes/s where there is nothing to cross."""


@dataclass(frozen=True)
class Network:
    """The links of a cluster, as collectives see them: arrays over layouts or single values."""

    devices_per_node: Ints
    inside_bandwidth: Floats
    inside_latency: Floats
    in_switch: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    node_bandwidth: Floats
    """All adapters of a node together."""
    outside_latency: Floats

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Network:
        """Of a cluster, with the part of the bandwidth that large collectives reach."""
        intra, inter, efficiency = cluster.links.intra, cluster.links.inter, cluster.device.efficiency
        return cls(
            devices_per_node=np.asarray(cluster.devices_per_node),
            inside_bandwidth=np.asarray(_NO_LINK if intra is None else intra.bandwidth * efficiency.link),
            inside_latency=np.asarray(0.0 if intra is None else intra.latency),
            in_switch=np.asarray(intra is not None and intra.in_switch),
            node_bandwidth=np.asarray(_NO_LINK if inter is None else inter.nics * inter.bandwidth * efficiency.network),
            outside_latency=np.asarray(0.0 if inter is None else inter.latency),
        )


@dataclass(frozen=True)
class Group:
    """The groups along one axis: their size and how they lie on nodes."""

    size: Floats
    inside: Floats
    """Members in one node."""
    nodes: Floats
    share: Floats
    """Bytes/s between nodes that the members in one node have."""

    @classmethod
    def of(cls, size: Ints, stride: Ints, network: Network) -> Group:
        """Groups of ``size`` devices that stand ``stride`` apart."""
        inside = np.clip(network.devices_per_node // np.maximum(stride, 1), 1, size).astype(float)
        nodes = np.ceil(size / inside)
        neighbours = np.minimum(network.devices_per_node, stride * size)
        whole_node = inside >= neighbours
        share = network.node_bandwidth / np.where(whole_node, 1, np.maximum(neighbours, 1))
        return cls(np.asarray(size, float), inside, nodes, np.where(nodes > 1, share, _NO_LINK))


def round_seconds(payload: Floats, group: Group, network: Network) -> Floats:
    """One reduce-scatter or one all-gather of ``payload`` bytes in all (per call)."""
    n, inside, nodes = group.size, group.inside, group.nodes
    slowest = np.where(inside > 1, np.minimum(network.inside_bandwidth, group.share), group.share)
    crossing = np.where(nodes > 1, nodes, 0.0)
    ring = (n - 1) / n * payload / slowest + network.inside_latency * (n - np.maximum(crossing, 1))
    ring = ring + network.outside_latency * crossing
    layered = (
        (inside - 1) / inside * payload / network.inside_bandwidth
        + (inside - 1) * network.inside_latency
        + (nodes - 1) / nodes * payload / group.share
        + np.log2(np.maximum(nodes, 1)) * network.outside_latency
    )
    return np.where(n > 1, np.minimum(ring, layered), 0.0)


def all_reduce_seconds(payload: Floats, group: Group, network: Network) -> Floats:
    """One all-reduce of ``payload`` bytes."""
    n, inside, nodes = group.size, group.inside, group.nodes
    two_rounds = 2 * round_seconds(payload, group, network)
    slowest = np.where(inside > 1, np.minimum(network.inside_bandwidth, group.share), group.share)
    steps = np.ceil(np.log2(np.maximum(inside, 1))) * network.inside_latency
    steps = steps + np.ceil(np.log2(np.maximum(nodes, 1))) * network.outside_latency
    best = np.minimum(two_rounds, 2 * steps + 2 * payload / slowest)
    switched = 2 * network.inside_latency + payload / network.inside_bandwidth
    best = np.where(network.in_switch & (nodes == 1), np.minimum(best, switched), best)
    return np.where(n > 1, best, 0.0)


def send_seconds(payload: Floats, stride: Ints, network: Network, sliced: bool, tp: Ints) -> Floats:
    """One device's message of ``payload`` bytes to the device ``stride`` further, all devices sending at once."""
    crosses = stride >= network.devices_per_node
    share = network.node_bandwidth / np.maximum(network.devices_per_node, 1)
    outside = payload / (tp if sliced else 1) / share + network.outside_latency
    regather = np.where(tp > 1, (tp - 1) / tp * payload / network.inside_bandwidth, 0.0) if sliced else 0.0
    return np.where(crosses, outside + regather, payload / network.inside_bandwidth + network.inside_latency)
