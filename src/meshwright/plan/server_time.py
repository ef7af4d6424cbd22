"""Seconds of a step with a parameter server: what workers pull and push over links that servers share.

P workers, g of them on the first node, which also has all servers (the launcher starts them there), S shards of them;
n parameters, c bytes each to a worker and w bytes back:

    pull    max( (P-g) n c / node's adapters,  P n c / S / a link inside )        push   the same with w
    update  n / S parameters' optimizer on a server

``synchronous``: all pull at once, compute, push, and wait for the update: the sum of these. Otherwise nobody waits for
another in the mean: a worker's own round (its pull and push alone on the links), or where that is longer, what the
node's adapters need in one direction for all workers' rounds, or what a server needs to take in pushes and update.
Asynchronously every worker's push is an update. Replicas of a shard pass on what comes while more comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.job.sync_section import SyncSection
from meshwright.plan.arrays import Floats
from meshwright.plan.collectives import Network
from meshwright.plan.exchange import Axis


@dataclass(frozen=True)
class ServerTime:
    """Seconds of a step beside the workers' computation."""

    exchange: Floats
    """Pulls and pushes, and what a worker waits for others'."""
    update: Floats


def server_time(
    sync: SyncSection, workers: Axis, network: Network, *, pull: Floats, push: Floats, update: Floats, compute: Floats
) -> ServerTime:
    """What servers add to a step.

    Args:
        sync: its mode and number of servers.
        workers: the dp ranks.
        network: links.
        pull: bytes of all parameters as a worker reads them.
        push: bytes of all gradients.
        update: seconds of updating all parameters on one rank.
        compute: seconds of a worker's own computation.
    """
    ranks, away = np.asarray(workers.size, float), np.asarray(workers.size - workers.group.inside, float)
    each = 1.0 / sync.servers
    adapters, near = network.node_bandwidth, network.inside_bandwidth
    latency = 2 * np.where(away > 0, network.outside_latency, network.inside_latency)

    def takes(payload: Floats, count: Floats, far: Floats) -> Floats:
        return np.asarray(np.maximum(far * payload / adapters, count * payload * each / near))

    updates = update * each
    if sync.server_mode == "synchronous":
        return ServerTime(takes(pull, ranks, away) + takes(push, ranks, away) + latency, updates + 0.0 * ranks)
    one, outside = np.ones_like(ranks), np.asarray(away > 0, float)
    own = takes(pull, one, outside) + takes(push, one, outside) + latency + compute
    count = ranks if sync.server_mode == "asynchronous" else one
    wire = np.maximum(takes(pull, ranks, away), takes(push, ranks, away))
    busy = ranks * push * each / near + count * updates
    longest = np.maximum(np.maximum(own, wire), busy)
    return ServerTime(np.asarray(longest - compute), 0.0 * ranks)


def server_bytes(workers: Axis, *, pull: Floats, push: Floats) -> tuple[Floats, Floats]:
    """Bytes of one worker inside a node and between nodes in a step, both directions; the mean over workers."""
    away = (workers.size - workers.group.inside) / workers.size
    return np.asarray((1 - away) * (pull + push)), np.asarray(away * (pull + push))
