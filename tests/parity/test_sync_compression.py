"""The cases of ``--matrix sync`` that compress, or let replicas train apart: a sample, and all of them with ``all``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.job.job import load_job
from meshwright.prove.check import Prover
from meshwright.prove.layout_run import run_layout
from meshwright.prove.parity import parameter_difference
from meshwright.prove.pool import RankPool
from meshwright.prove.sync_cases_compression import compression_cases
from meshwright.prove.sync_cases_local import local_cases
from meshwright.prove.sync_proof import SameRun, SyncProof
from tests.small_jobs import one_device, request, small_job

Ranks = Callable[[int], RankPool]

CASES = [*compression_cases(), *local_cases()]
SAMPLE = {
    "int8, block 1, dp=2 zero=2 micro_batch=2",
    "int8, block 1, between nodes of 2 alone, dp=4 micro_batch=1, sgd",
    "dgc, all elements, dp=2 zero=2 micro_batch=2, with momentum",
    "powersgd, full rank, dp=2 zero=1 micro_batch=2",
    "zero-one-adam, whole rounds alone, dp=2",
    "local SGD, period 1, global batch 7, dp=2",
    "DiLoCo, outer step 1 = local SGD, period 5, adamw, dp=2 micro_batch=2",
}


@pytest.mark.parametrize(
    "proof",
    [pytest.param(each, id=each.label, marks=[] if each.label in SAMPLE else [pytest.mark.all]) for each in CASES],
)
def test_case(ranks: Ranks, proof: SyncProof | SameRun) -> None:
    job = load_job("examples/quickstart.toml")
    with Prover(ranks) as prover:
        for verdict in proof.prove(prover, job, "float64", 10 if proof.label not in SAMPLE else 3):
            assert verdict.passed, verdict


@pytest.mark.parametrize("layout", ["dp=4 micro_batch=2", "dp=4 shard=2 zero=2 micro_batch=2"])
def test_replicas_that_still_sum_their_gradients_are_clipped_by_one_number(ranks: Ranks, layout: str) -> None:
    job = small_job(
        layout,
        optimizer={"clip_norm": 0.1},  # of gradients over 1, from unequal numbers of valid tokens
        sync={"strategy": "local", "period": 4, "synchronous_steps": 100},
        train={"steps": 101},
    )
    found = run_layout(ranks(4), request(job, 8, gradients=False))  # raises where two replicas differ by a bit
    assert parameter_difference(found.parameters, one_device(job, 8).parameters, 0.05)[0] < 1e-10


def test_the_sample_exists() -> None:
    assert {each.label for each in CASES} >= SAMPLE
