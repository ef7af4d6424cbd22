"""Gradient sums by each algorithm: predicted, traced and measured traffic agree, wire bytes included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.job.job import Job
from meshwright.job.sync_section import UNCHUNKED
from meshwright.ledger.compare import compare
from meshwright.plan.predict import predict
from meshwright.prove.ledgers import measure
from meshwright.prove.pool import RankPool
from meshwright.prove.sync_cases_algorithms import ALGORITHMS
from tests.ledger.exactly import EXACT, differences
from tests.small_jobs import small_job

LAYOUTS = ("dp=3", "dp=4 shard=2 zero=1", "dp=3 tp=2 zero=1", "dp=6 shard=3 zero=3", "dp=5 zero=2", "dp=4 pp=2")


def job_with(algorithm: str, layout: str, **others: dict[str, Any]) -> Job:
    sync: dict[str, Any] = {"algorithm": algorithm}
    if algorithm not in UNCHUNKED and ("zero" not in layout or "shard" in layout):  # else nothing is all-reduced
        sync["chunk_bytes"] = 5000
    if algorithm in ("hierarchical", "leaders"):
        sync["node_size"] = 2
    return small_job(f"{layout} micro_batch=1", sync=sync, batch={"global_size": 12}, **others)


@pytest.mark.parametrize(("algorithm", "layout"), [
    (algorithm, layout) if (index + number) % len(LAYOUTS) == 0
    else pytest.param(algorithm, layout, marks=pytest.mark.all)
    for index, algorithm in enumerate(ALGORITHMS) for number, layout in enumerate(LAYOUTS)
])  # fmt: skip
def test_predicted_traffic_is_what_the_program_sends(algorithm: str, layout: str) -> None:
    job = job_with(algorithm, layout)
    rank = job.layout.ranks - 1
    assert differences(job, rank) == [], (algorithm, layout, rank)


@pytest.mark.parametrize(("algorithm", "layout"), [
    ("hierarchical", "dp=4 shard=2 zero=1"),
    pytest.param("halving-doubling", "dp=2 zero=3", marks=pytest.mark.all),
    pytest.param("ring", "dp=4", marks=pytest.mark.all),
])  # fmt: skip
def test_measured_traffic_is_what_was_predicted(
    ranks: Callable[[int], RankPool], algorithm: str, layout: str
) -> None:
    job = job_with(algorithm, layout)
    found = compare([measure(ranks(job.layout.ranks), job), predict(job)], EXACT)
    sends = [each for each in found if each.quantity.startswith("sends")]
    assert any("reduce" in each.quantity for each in sends)
    assert [f"{each.rank} {each.quantity}: {each.values}" for each in sends if not each.agrees] == []


def test_another_chunk_size_than_the_programs_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form has its own idea of chunks: a program that cuts otherwise is found out by its wire bytes."""
    from meshwright.sync.run import Scheduled

    job = job_with("ring", "dp=3")
    assert differences(job, 0) == []
    monkeypatch.setattr(Scheduled, "chunks", lambda self, flat: 1)
    assert any("wire" in each for each in differences(job, 0))
