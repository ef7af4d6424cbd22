"""Which all-reduce algorithm, and which bucket size, by the links of a cluster: ``sync.algorithm = "auto"``.

P ranks on N nodes, g on each, n bytes; a latency for each round, a little for each message, and bytes/s inside a node
and between nodes (all adapters of a node together). Ranks of a node send at the same time, so what counts is what a
node puts on its link:

                       rounds                bytes of a rank inside        bytes of a node outside
    direct (P-1 each)  2                     2 (g-1)/P n                   2 g (N-1)/N n
    ring               2 (P-1)               2 (P-1)/P n                   2 (P-1)/P n
    tree               2 log2 P              2 n, in chunks                2 n at least, in chunks
    halving-doubling   2 log2 P              2 (g-1)/g n/N                 2 g (N-1)/N n
    hierarchical       2 inside, 2 (N-1)     2 (g-1)/g n                   2 (N-1)/N n
    leaders            2 inside, 2 (N-1)     2 (g-1) n, the leader         2 (N-1)/N n

Inside one node nothing is faster than the direct exchange through shared memory, which needs no search. Between nodes
the same holds for the two-level form once g > 1, as long as ``n`` is not so small that rounds are all that counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.job.cluster import ClusterSpec
from meshwright.job.job import Job
from meshwright.plan.place import Place
from meshwright.plan.state import division, units

MESSAGE_SECONDS = 1e-4
"""What a rank's own program takes for a message, beside the link: posted, waited for."""
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


@dataclass(frozen=True)
class _Links:
    inside_latency: float
    inside_bandwidth: float
    outside_latency: float
    outside_bandwidth: float

    @classmethod
    def of(cls, cluster: ClusterSpec) -> _Links:
        intra, inter = cluster.links.intra, cluster.links.inter
        return cls(
            0.0 if intra is None else intra.latency,
            math.inf if intra is None else intra.bandwidth,
            0.0 if inter is None else inter.latency,
            math.inf if inter is None else inter.bandwidth * inter.nics,
        )


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
    links = _Links.of(cluster)
    inside, nodes = _spread(job, cluster, divided.degree)
    times = seconds(largest, inside, nodes, links)
    # Copies of one node each, or one node: the direct exchange, which is what there was before there was a choice.
    best = min(times, key=lambda name: (times[name], name != "direct")) if nodes > 1 else "direct"
    two_level = best in ("hierarchical", "leaders")
    fixed = times[best] - seconds(0, inside, nodes, links)[best]
    rate = largest / fixed if fixed > 0 else math.inf
    return Choice(
        best, cluster.devices_per_node if two_level else None, times,
        best_bucket(total, seconds(0, inside, nodes, links)[best], rate),
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


def seconds(size: float, inside: int, nodes: int, links: _Links) -> dict[str, float]:
    """Of one all-reduce of ``size`` bytes over ``nodes`` times ``inside`` ranks, by algorithm."""
    ranks = inside * nodes
    if ranks == 1:
        return {"direct": 0.0}
    near, far = links.inside_latency, links.outside_latency
    slow = far if nodes > 1 else near
    one = slow + MESSAGE_SECONDS
    levels = math.ceil(math.log2(ranks))
    narrow = min(links.inside_bandwidth, links.outside_bandwidth if nodes > 1 else math.inf)
    across = (nodes - 1) / nodes * size

    def takes(latency: float, within: float, outside: float) -> float:
        return latency + within / links.inside_bandwidth + outside / links.outside_bandwidth

    found = {
        "direct": takes(
            2 * (slow + (ranks - 1) * MESSAGE_SECONDS), 2 * (inside - 1) / ranks * size, 2 * inside * across
        ),
        "ring": 2 * (ranks - 1) * one + 2 * (ranks - 1) / ranks * size / narrow,
        "tree": takes(2 * levels * one, 2 * size, 2 * size if nodes > 1 else 0.0),
        "halving-doubling": takes(2 * levels * one, 2 * (inside - 1) / ranks * size, 2 * inside * across),
    }
    if nodes > 1 and inside > 1:
        both = 2 * (near + (inside - 1) * MESSAGE_SECONDS) + 2 * (nodes - 1) * one
        found["hierarchical"] = takes(both, 2 * (inside - 1) / inside * size, 2 * across)
        found["leaders"] = takes(both, 2 * (inside - 1) * size, 2 * across)
    return found


def _spread(job: Job, cluster: ClusterSpec, degree: int) -> tuple[int, int]:
    """How many of the dp ranks of a group share a node, and on how many nodes they stand."""
    neighbours = max(1, cluster.devices_per_node // job.layout.tp)
    inside = min(degree, neighbours)
    return inside, -(-degree // inside)
