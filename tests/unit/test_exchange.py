"""Seconds and bytes of exchanges by the way they go, against the very messages that training sends."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.job.cluster import ClusterSpec
from meshwright.plan.collectives import Network
from meshwright.plan.exchange import Axis, Leg, leg_bytes, leg_seconds
from meshwright.sync.schedules import TWO_LEVEL, make_schedule
from tests.slow_cluster import slow_cluster

BYTES = 8.0 * 2**20


def leg(
    cluster: ClusterSpec, way: str, ranks: int, operation: str = "all_reduce", stride: int = 1
) -> tuple[Leg, Network]:
    network = Network.of(cluster)
    axis = Axis.of(np.array([ranks]), np.array([stride]), network)
    return Leg(operation, np.array([BYTES]), axis, way), network  # type: ignore[arg-type]


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (2, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("way", ["ring", "tree", "halving-doubling", "hierarchical", "leaders", "ordered"])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_bytes_out_of_a_node_are_those_of_the_schedules_messages(
    nodes: int, each: int, way: str, operation: str
) -> None:
    ranks, elements = nodes * each, int(BYTES / 4)
    of_rank = [rank // each for rank in range(ranks)]
    schedule = make_schedule(way, of_rank if way in TWO_LEVEL else None)
    crossing = 0
    for rank in range(ranks):
        size = elements if operation == "all_reduce" else elements // ranks
        for one in getattr(schedule, operation)(rank, ranks, size):
            crossing += sum(sent.elements for sent in one.sends if of_rank[sent.peer] != of_rank[rank])
    found, network = leg(slow_cluster(nodes, each), way, ranks, operation)
    sent = leg_bytes(found, network)[1][0]
    if way == "tree" and operation == "reduce_scatter":  # charged as two rounds; the rows that go down are fewer
        assert sent > 4 * crossing / ranks
    else:
        assert sent == pytest.approx(4 * crossing / ranks, rel=0.01)


def test_a_direct_sum_over_a_slow_link_takes_what_the_node_puts_on_it() -> None:
    found, network = leg(slow_cluster(2, 2), "direct", 4)
    # Two ranks, each half of the buffer to the other node in both rounds, over 12.5 MB/s.
    assert leg_seconds(found, network)[0] == pytest.approx(2 * 2 * BYTES / 2 / 12.5e6, rel=0.01)
    two_level, _ = leg(slow_cluster(2, 2), "hierarchical", 4)
    assert leg_seconds(two_level, network)[0] == pytest.approx(BYTES / 12.5e6, rel=0.01)


def test_groups_of_a_node_share_its_adapters() -> None:
    """Two groups, one member of each on either node: together they put as much on the link as one of two each."""
    apart, network = leg(slow_cluster(2, 2), "direct", 2, stride=2)
    together, _ = leg(slow_cluster(2, 2), "direct", 4)
    assert leg_seconds(apart, network)[0] == pytest.approx(leg_seconds(together, network)[0], rel=0.01)


def test_the_fastest_is_the_direct_one_in_a_node_and_never_slower_than_any_between_nodes() -> None:
    alone, network = leg(slow_cluster(2, 4), "fastest", 4)
    assert leg_seconds(alone, network) == leg_seconds(leg(slow_cluster(2, 4), "direct", 4)[0], network)
    wide = slow_cluster(4, 4)
    found, network = leg(wide, "fastest", 16)
    ways = ("direct", "ring", "tree", "halving-doubling", "hierarchical", "leaders")
    assert leg_seconds(found, network)[0] == min(leg_seconds(leg(wide, way, 16)[0], network)[0] for way in ways)


def test_a_small_sum_in_rank_order_is_one_round() -> None:
    network = Network.of(slow_cluster(2, 2))
    axis = Axis.of(np.array([4]), np.array([1]), network)

    def sent(payload: float, calls: float) -> float:
        one = Leg("all_reduce", np.array([payload]), axis, "direct", calls=np.array([calls]), one_round=True)
        return float(sum(leg_bytes(one, network))[0])

    assert sent(100_000.0, 1) == pytest.approx(3 * 100_000)
    assert sent(1e6, 1) == pytest.approx(2 * 3 / 4 * 1e6)
    assert sent(1e6, 10) == pytest.approx(3 * 1e6), "in ten buffers, each of them small"


def test_one_rank_sends_nothing() -> None:
    for way in ("native", "direct", "hierarchical", "fastest"):
        found, network = leg(slow_cluster(2, 2), way, 1)
        assert leg_seconds(found, network)[0] == 0 and leg_bytes(found, network)[1][0] == 0
