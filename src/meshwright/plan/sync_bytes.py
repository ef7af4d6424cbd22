"""Bytes that one rank sends for data parallelism in a step, inside its node and between nodes.

From the same operations as the time (``sync_legs``), so ratios of ways are those of their seconds on the wire. To the
byte, with padding and by axis, they are in the predicted ledger; links between nodes are not told apart there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.job.cluster import ClusterSpec
from meshwright.plan.arrays import Floats, Layouts, Work
from meshwright.plan.collectives import Network
from meshwright.plan.evaluate import rules_of
from meshwright.plan.exchange import Leg, leg_bytes
from meshwright.plan.server_time import server_bytes
from meshwright.plan.shape import Shape
from meshwright.plan.stages import held, rank_parameters
from meshwright.plan.sync_legs import Legs, SyncTerms


def link_bytes(work: Work, cluster: ClusterSpec, layouts: Layouts) -> tuple[Floats, Floats]:
    """Bytes a rank and step inside a node and between nodes; the mean over a node's ranks and a period's steps.

    Args:
        work: the step, with the job's [sync].
        cluster: its links.
        layouts: columns.
    """
    shape, network, rules = Shape.of(work), Network.of(cluster), rules_of(work)
    ranks = held(layouts, shape.layers)
    legs = Legs(SyncTerms.of(work, cluster, rules), shape, layouts, network, ranks)
    local = np.maximum.reduce([rank_parameters(shape, layouts, rank) for rank in ranks])
    zero, m = layouts.zero, layouts.micro_batches
    one = np.ones(layouts.dp.shape)
    owned = local / np.where(zero > 0, layouts.shard, 1)
    if legs.terms.servers:
        return server_bytes(legs.shard, pull=local * rules.gather_bytes, push=local * legs.terms.wide)
    gathers = np.select([zero == 0, zero == 3], [0.0 * one, 2.0 * m], one)
    found = [
        _sent(legs.replicated(local), network, np.where(zero == 0, 1.0, 0.0)),
        _sent(legs.scatter(local), network, np.select([zero == 0, zero == 1], [0.0 * one, one], 1.0 * m)),
        _sent(legs.across(owned), network, np.where(zero == 0, 0.0, 1.0)),
        _sent([legs.gather(local * rules.gather_bytes)], network, gathers),
        *(_sent(met, network, often * one) for often, met in legs.meetings(owned)),
    ]
    inside, outside = zip(*found, strict=True)
    return np.add.reduce(inside), np.add.reduce(outside)


def crosses_nodes(work: Work, cluster: ClusterSpec, layouts: Layouts) -> bool:
    """Whether data parallel ranks of the (one) layout stand on several nodes."""
    shape, network, rules = Shape.of(work), Network.of(cluster), rules_of(work)
    legs = Legs(SyncTerms.of(work, cluster, rules), shape, layouts, network, held(layouts, shape.layers))
    return bool(np.any(legs.shard.group.nodes > 1) or np.any(legs.copy.group.nodes > 1))


def _sent(legs: Sequence[Leg], network: Network, times: Floats) -> tuple[Floats, Floats]:
    each = [leg_bytes(leg, network) for leg in legs]
    inside, outside = 0.0 * times, 0.0 * times
    for near, far in each:
        inside, outside = inside + times * near, outside + times * far
    return inside, outside
