"""The planner's all-reduce algorithm and bucket size, by hand-worked links."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.job.cluster import ClusterSpec
from meshwright.plan.sync_choice import LEAST_BUCKET, MOST_BUCKET, best_bucket, choose
from tests.small_jobs import small_job


def cluster(nodes: int, per_node: int, outside: float, latency: float = 1e-4) -> ClusterSpec:
    return ClusterSpec.model_validate(
        {
            "nodes": nodes, "devices_per_node": per_node, "device": "A100-SXM4-80GB",
            "links": {
                "intra": {"kind": "shared memory", "bandwidth": 4e9, "latency": 1e-5},
                "inter": {"kind": "ethernet", "bandwidth": outside, "latency": latency},
            },
        }
    )  # fmt: skip


def job(layout: str, **sync: Any) -> Any:
    return small_job(f"{layout} micro_batch=1", memory={"bucket_bytes": 1 << 22}, sync=sync)


def test_one_node_keeps_the_direct_exchange() -> None:
    assert choose(job("dp=4"), cluster(1, 4, 1e9)).algorithm == "direct"
    assert choose(job("dp=8"), cluster(2, 8, 1e6)).algorithm == "direct"  # all on the first


def test_a_slow_link_between_nodes_of_several_ranks_takes_a_two_level_form() -> None:
    found = choose(job("dp=8"), cluster(2, 4, 12.5e6))
    assert found.algorithm in ("hierarchical", "leaders") and found.node_size == 4
    # The link carries g times less: with so slow a one, that is nearly all of the time.
    assert found.seconds["direct"] / found.seconds[found.algorithm] == pytest.approx(4, rel=0.3)


def test_one_rank_a_node_and_short_messages_take_few_rounds() -> None:
    """Sixteen nodes: the direct exchange posts fifteen messages a round, the tree and the halving at most two."""
    tiny = small_job("dp=16 micro_batch=1", batch={"global_size": 16}, memory={"bucket_bytes": 1 << 8})
    found = choose(tiny, cluster(16, 1, 1e9, latency=1e-5))
    assert found.algorithm in ("tree", "halving-doubling")


def test_the_best_bucket_balances_what_many_and_what_large_ones_cost() -> None:
    total, latency, rate = 400e6, 1e-3, 1e9
    best = best_bucket(total, latency, rate)

    def exposed(size: float) -> float:
        return total / size * latency + size / rate

    assert exposed(best) <= min(exposed(best * 1.1), exposed(best / 1.1))
    assert best_bucket(total, 1e-9, rate) == LEAST_BUCKET
    assert best_bucket(1e12, 1.0, rate) == MOST_BUCKET
