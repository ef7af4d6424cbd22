"""Per-bucket times of a timed step: order, sums, one entry a reduction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.ledger.ledger import RankLedger
from meshwright.prove.ledgers import measure
from meshwright.prove.pool import RankPool
from tests.small_jobs import small_job


def measured(ranks: Callable[[int], RankPool], layout: str, algorithm: str) -> list[RankLedger]:
    job = small_job(f"{layout} micro_batch=2", memory={"bucket_bytes": 1 << 14}, sync={"algorithm": algorithm})
    return list(measure(ranks(2), job).ranks)


@pytest.mark.parametrize(("layout", "algorithm"), [("dp=2", "auto"), ("dp=2 zero=1", "ring"), ("dp=2 zero=2", "auto")])
def test_every_sum_of_a_step_has_its_times(ranks: Callable[[int], RankPool], layout: str, algorithm: str) -> None:
    for entry in measured(ranks, layout, algorithm):
        spends = entry.spends
        assert spends is not None
        sums = [send for send in entry.sends if send.phase == "reduce" and send.axis in ("dp", "shard")]
        first = next(send for send in sums if send.operation in ("reduce_scatter", "all_reduce"))
        assert len(spends.buckets) == first.messages > 2
        assert sum(one.bytes for one in spends.buckets) == first.payload
        for one in spends.buckets:
            assert 0 < one.ready <= one.start <= one.end <= spends.wall
            assert 0 <= one.exposed <= one.end - one.start
        starts = [one.start for one in spends.buckets]
        assert starts == sorted(starts), "buckets end in the order in which they start"
        exposed = sum(one.exposed for one in spends.buckets)
        assert exposed <= spends.wall


def test_the_bucket_size_of_sync_goes_before_that_of_memory() -> None:
    assert small_job("dp=2").bucket_bytes == 1 << 15
    assert small_job("dp=2", sync={"bucket_bytes": 1 << 12}).bucket_bytes == 1 << 12


def test_smaller_buckets_of_sync_are_more_reductions(ranks: Callable[[int], RankPool]) -> None:
    counts = []
    for size in (1 << 13, 1 << 15):
        job = small_job("dp=2 micro_batch=2", memory={"bucket_bytes": 1 << 20}, sync={"bucket_bytes": size})
        spends = measure(ranks(2), job).ranks[0].spends
        assert spends is not None
        counts.append(len(spends.buckets))
    assert counts[0] > counts[1] > 1
