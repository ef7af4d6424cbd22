"""Which all-reduce algorithm, and which bucket size, by the links of a cluster: ``sync.algorithm = "auto"``.

The closed forms are ``exchange``'s. Ranks of a node send at the same time, so between nodes what counts is what a node
puts on its link: the direct exchange, 2 g (N-1)/N n bytes of n on N nodes of g ranks, a two-level form 2 (N-1)/N n.

Inside one node nothing is faster than the direct exchange through shared memory, which needs no search. Between nodes
the same holds for the two-level form once g > 1, as long as ``n`` is not so small that rounds are all that counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwright.job.cluster import ClusterSpec
from meshwright.job.job import Job
from meshwright.job.sync_section import TWO_LEVEL_ALGORITHMS
from meshwright.plan.collectives import Network
from meshwright.plan.exchange import CHOICES, Axis, Leg, leg_seconds
from meshwright.plan.place import Place
from meshwright.plan.state import division, units

LEAST_BUCKET, MOST_BUCKET = 2**20, 64 * 2**20


@dataclass(frozen=True)
class Choice:
    """The planner's answer."""

    algorithm: str
    node_size: int | None
    seconds: dict[str, float]
    """Of one sum of the largest bucket, by algorithm."""
    bucket_bytes: int
    """The size that exposes least."""


def choose(job: Job, cluster: ClusterSpec) -> Choice:
    """The quickest algorithm for the job's largest sum over its data parallel ranks.

    Args:
        job: resolved.
        cluster: what it runs on; ranks fill its nodes in order.
    """
    place = Place(job, 0)
    divided, width = division(job, place), place.wide_bytes
    sizes = [unit.size * width for unit in units(job, place)]
    largest, total = max(sizes, default=0), sum(unit.size * unit.times * width for unit in units(job, place))
    network = Network.of(cluster)
    axis = Axis.of(np.asarray(divided.degree), np.asarray(job.layout.tp), network)
    times, latencies = _seconds(largest, axis, network), _seconds(0, axis, network)
    # Copies of one node each, or one node: the direct exchange, which is what there was before there was a choice.
    best = min(times, key=lambda name: (times[name], name != "direct")) if float(axis.group.nodes) > 1 else "direct"
    fixed = times[best] - latencies[best]
    rate = largest / fixed if fixed > 0 else math.inf
    return Choice(
        best, cluster.devices_per_node if best in TWO_LEVEL_ALGORITHMS else None, times,
        best_bucket(total, latencies[best], rate),
    )  # fmt: skip


def best_bucket(total: float, latency: float, rate: float) -> int:
    """The bucket size that exposes least: S latency/b for the number of buckets, b/rate for the last one; sqrt of both.

    Args:
        total: gradient bytes S.
        latency: seconds of a sum of nothing.
        rate: bytes/s of a sum.
    """
    if not math.isfinite(rate):
        return 25 * 2**20
    return int(min(max(math.sqrt(total * latency * rate), LEAST_BUCKET), MOST_BUCKET))


def _seconds(size: float, axis: Axis, network: Network) -> dict[str, float]:
    """Of one all-reduce of ``size`` bytes, by algorithm."""
    if int(axis.size) == 1:
        return {"direct": 0.0}
    two_levels = float(axis.group.nodes) > 1 and float(axis.group.inside) > 1
    names = [name for name in CHOICES if two_levels or name not in TWO_LEVEL_ALGORITHMS]
    return {name: float(leg_seconds(Leg("all_reduce", np.asarray(float(size)), axis, name), network)) for name in names}
