"""Deterministic mode: changing dp, or the ZeRO stage, changes not one bit; two runs are equal; so is a resumed one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.prove.pool import RankPool
from tests.small_jobs import run, small_job

Ranks = Callable[[int], RankPool]
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.5}


def bits(
    ranks: Ranks, layout: str, dtype: str, global_size: int = 8
) -> tuple[list[float], list[float], dict[str, bytes]]:
    job = small_job(
        layout,
        optimizer=ADAMW,
        precision={"dtype": dtype},
        train={"deterministic": True},
        batch={"global_size": global_size},
    )
    trace = run(ranks, job, 4)
    return trace.losses, trace.norms, {name: value.tobytes() for name, value in trace.parameters.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dp_and_zero_change_no_bit(ranks: Ranks, dtype: str) -> None:
    reference = bits(ranks, "dp=1 micro_batch=1", dtype)
    for layout in ("dp=2 zero=0", "dp=4 zero=0", "dp=2 zero=1", "dp=4 zero=2", "dp=2 zero=3", "dp=4 zero=3"):
        assert bits(ranks, f"{layout} micro_batch=1", dtype) == reference, layout


def test_dp_that_does_not_divide_the_batch_changes_no_bit(ranks: Ranks) -> None:
    reference = bits(ranks, "dp=1 micro_batch=1", "float32", global_size=7)
    for layout in ("dp=2", "dp=4 zero=1"):
        assert bits(ranks, f"{layout} micro_batch=1", "float32", global_size=7) == reference, layout


def test_dp_changes_no_bit_beside_tensor_and_pipeline_parallelism(ranks: Ranks) -> None:
    assert bits(ranks, "dp=2 tp=2 micro_batch=1", "float32") == bits(ranks, "tp=2 micro_batch=1", "float32")
    assert bits(ranks, "dp=2 pp=2 micro_batch=1", "float32") == bits(ranks, "pp=2 micro_batch=1", "float32")


@pytest.mark.parametrize("layout", ["dp=4 zero=3", "dp=2 tp=2", "pp=2 micro_batch=1 schedule=zero-bubble"])
def test_two_runs_are_bit_equal(ranks: Ranks, layout: str) -> None:
    job = small_job(layout, optimizer=ADAMW, precision={"dtype": "float32"})
    first, second = run(ranks, job), run(ranks, job)
    assert first.losses == second.losses
    assert first.norms == second.norms
    assert all(first.parameters[name].tobytes() == second.parameters[name].tobytes() for name in first.parameters)
