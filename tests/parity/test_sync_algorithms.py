"""Gradients summed by each algorithm against one device: the cases of ``check --matrix sync``, and planted errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.job.job import Job, load_job
from meshwright.prove.check import Prover
from meshwright.prove.matrix import Case
from meshwright.prove.pool import RankPool
from meshwright.prove.sync_cases_algorithms import algorithm_cases
from meshwright.prove.sync_matrix import against_one_device
from meshwright.sync.ring import Ring
from meshwright.sync.schedule import Round
from tests.small_jobs import request, small_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.toml"
CASES = list(algorithm_cases())
SAMPLE = (
    "ring, dp=2 tp=2 zero=0", "halving-doubling, dp=4 shard=2 zero=3", "hierarchical, dp=4 zero=2",
    "leaders, dp=4 shard=2 zero=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def job() -> Job:
    return load_job(EXAMPLE)


@pytest.fixture(scope="module")
def prover(ranks: Callable[[int], RankPool]) -> Prover:
    return Prover(ranks)


@pytest.mark.parametrize(
    ("case", "values"),
    [
        pytest.param(case, values, id=case.label, marks=() if case.label in SAMPLE else pytest.mark.all)
        for case, values in CASES
    ],
)
def test_every_algorithm_gives_the_update_of_one_device(
    prover: Prover, job: Job, case: Case, values: dict[str, Any]
) -> None:
    (result,) = against_one_device(case, values, ("sgd",)).prove(prover, job, "float64", 2)
    assert result.passed, result
    assert result.max_relative_parameter_difference < 1e-10


def test_the_sample_is_of_the_cases() -> None:
    assert {case.label for case, _ in CASES} >= set(SAMPLE)


def a_ring_that_forgets(layout: str) -> float:
    """On every rank: train with a ring whose last addition is lost; how far the first norm is from the right one."""
    original = Ring.all_reduce

    def forgetful(self: Ring, rank: int, ranks: int, elements: int) -> list[Round]:
        rounds = original(self, rank, ranks, elements)
        return [replace(one, adds=one.adds and number < ranks - 2) for number, one in enumerate(rounds)]

    from meshwright.prove.layout_run import train_on_rank

    right = small_job(f"{layout} micro_batch=1", sync={"algorithm": "ring"})
    Ring.all_reduce = forgetful  # type: ignore[method-assign]
    try:
        wrong = train_on_rank(request(right, 2)).norms[0]
    finally:
        Ring.all_reduce = original  # type: ignore[method-assign]
    return abs(wrong / train_on_rank(request(right, 2)).norms[0] - 1)


def test_an_addition_that_is_lost_shows(ranks: Callable[[int], RankPool]) -> None:
    assert min(ranks(4).run(a_ring_that_forgets, "dp=4")) > 1e-3
