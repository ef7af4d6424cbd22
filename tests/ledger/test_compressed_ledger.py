"""Compression and replicas that train apart in the three ledgers: predicted, traced and measured are the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.job.job import Job, load_job
from meshwright.job.layout_text import parse_layout
from meshwright.job.steady import steady_step
from meshwright.ledger.compare import compare
from meshwright.plan.predict import predict
from meshwright.prove.check import proof_job
from meshwright.prove.ledgers import hold_together, ranks_to_trace
from meshwright.prove.matrix import Case
from meshwright.prove.pool import RankPool
from meshwright.prove.trace import trace

Ranks = Callable[[int], RankPool]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("dp=2 zero=2 micro_batch=2", {"compression": "powersgd", "compression_least_saving": 1.0}),
    ("dp=2 micro_batch=2", {"compression": "dgc", "compression_sparsity": 0.99, "compression_warmup_steps": 2}),
    ("dp=4 micro_batch=1", {"compression": "int8", "compression_level": "slow", "node_size": 2}),
    ("dp=2 micro_batch=4", {"strategy": "diloco", "period": 2, "compression": "int8"}),
    ("dp=4 shard=2 zero=1 micro_batch=2", {"strategy": "diloco", "period": 2, "compression": "dgc"}),
    ("dp=2 micro_batch=2", {"compression": "int8"}),
    ("dp=2 zero=1 micro_batch=2", {"compression": "sign"}),
    ("dp=2 zero=2 micro_batch=2", {"compression": "fp8"}),
    ("dp=2 micro_batch=2", {"compression": "powersgd"}),
    ("dp=2 zero=3 micro_batch=4", {"compression": "dgc"}),
    ("dp=2 micro_batch=2", {"compression": "one-bit-adam", "compression_warmup_steps": 3}),
    ("dp=2 micro_batch=2", {"compression": "zero-one-adam"}),
    ("dp=2 micro_batch=4", {"compression": "qsgd"}),
    ("dp=2 micro_batch=4", {"compression": "bf16"}),
    ("dp=2 micro_batch=4", {"strategy": "local", "period": 2}),
    ("dp=2 micro_batch=4", {"strategy": "easgd", "period": 2}),
    ("dp=2 micro_batch=4", {"strategy": "diloco", "period": 4, "fragments": 2}),
    ("dp=4 shard=2 zero=1 micro_batch=2", {"compression": "int8"}),
    ("dp=4 shard=2 zero=2 micro_batch=2", {"compression": "int8", "compression_level": "slow"}),
    ("dp=4 shard=2 micro_batch=2", {"strategy": "local", "period": 2, "average": "state"}),
    ("dp=4 shard=2 zero=3 micro_batch=2", {"strategy": "diloco", "period": 2}),
    ("dp=4 tp=2 micro_batch=2", {"compression": "zero-one-adam", "compression_level": "slow", "node_size": 4}),
    ("dp=4 pp=2 micro_batch=1", {"compression": "dgc", "compression_level": "slow", "node_size": 2}),
    ("dp=2 tp=2 micro_batch=2", {"compression": "dgc"}),
    ("dp=2 pp=2 micro_batch=2", {"compression": "sign"}),
    ("dp=2 micro_batch=4", {"strategy": "diloco", "period": 4, "overlap": 1}),
    ("dp=2 micro_batch=4", {"strategy": "diloco", "period": 4, "overlap": 1, "fragments": 2, "compression": "int8"}),
]
UNMARKED = 3


def job_of(text: str, sync: dict[str, Any]) -> Job:
    job, layout = load_job("examples/quickstart.toml"), parse_layout(text)
    plain = layout if layout.zero or layout.shard is None else layout.model_copy(update={"shard": None})
    small = proof_job(job, Case(text, plain), "float32", "adamw")
    return small.model_copy(update={"layout": layout, "sync": type(job.sync).model_validate(sync)})


@pytest.mark.parametrize(
    ("text", "sync"),
    [
        pytest.param(*case, id=f"{case[0]} {case[1]}", marks=[] if number < UNMARKED else [pytest.mark.all])
        for number, case in enumerate(CASES)
    ],
)
def test_ledgers_agree(ranks: Ranks, text: str, sync: dict[str, Any]) -> None:
    job = job_of(text, sync)
    found = hold_together(ranks(job.layout.ranks), job, text, ranks_to_trace(job.layout))
    assert [str(each) for each in found.differences if not each.agrees] == []


@pytest.mark.parametrize(
    ("changes", "operations"),
    [
        ({}, []),
        ({"compression": "int8"}, ["all_gather"]),
        ({"compression": "dgc"}, []),
        ({"compression": "sign", "fragments": 2}, ["all_gather"]),
    ],
    ids=str,
)
def test_of_sums_that_travel_for_steps_the_rest_is_sent(changes: dict[str, Any], operations: list[str]) -> None:
    """As predicted and as traced; that it is what a run sends is among the cases above."""
    job = job_of("dp=2 micro_batch=4", {"strategy": "diloco", "period": 4, "overlap": 1, **changes})
    predicted, traced = predict(job, backend="gloo"), trace(job, [1])
    assert [str(each) for each in compare([predicted, traced]) if not each.agrees] == []
    found = [send.operation for send in traced.ranks[0].sends if send.phase == "publish"]
    assert found == operations


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_every_fragment_is_padded_by_itself(compression: str) -> None:
    """Three replicas divide few numbers of elements; the shared model, its momentum and residuals are as held."""
    sync = {"strategy": "diloco", "period": 4, "fragments": 4, "compression": compression}
    job = job_of("dp=3 micro_batch=4", sync)
    assert predict(job, backend="gloo").ranks[1].stores.optimizer == trace(job, [1]).ranks[0].stores.optimizer


def sent(sync: dict[str, Any]) -> int:
    entry = predict(job_of("dp=2 micro_batch=4", sync), backend="gloo").ranks[0]
    return sum(send.payload for send in entry.sends if send.phase == "reduce")


def test_payloads_by_hand() -> None:
    """Of a rank's gradients in one bucket and another: 4 bytes an element whole, one and a scale in 256 as int8."""
    whole = sent({})  # reduce-scatter of n, all-gather of n / 2
    elements = whole / 6
    assert sent({"compression": "bf16"}) == pytest.approx(elements * (2 + 1))
    assert sent({"compression": "int8"}) == pytest.approx(elements * (1 + 4 / 256) * 1.5, rel=1e-3)
    assert sent({"compression": "sign"}) == pytest.approx(elements * (1 / 8 + 4 / 256) * 1.5, rel=1e-3)
    for bits in (2, 8):
        qsgd = sent({"compression": "qsgd", "compression_bits": bits})
        assert qsgd == pytest.approx(elements * (bits / 8 + 4 / 256) * 1.5, rel=1e-3)
    assert sent({"compression": "dgc"}) == pytest.approx(elements * 8 / 1000, rel=1e-2)


def test_the_recorded_step_is_a_steady_one() -> None:
    steps = [
        steady_step(job_of("dp=2 micro_batch=4", sync), 3)
        for sync in (
            {},
            {"compression": "dgc", "compression_warmup_steps": 10},
            {"compression": "zero-one-adam"},
            {"strategy": "diloco", "period": 5},
            {"strategy": "local", "period": 4, "synchronous_steps": 6},
        )
    ]
    assert steps == [3, 11, 18, 5, 8]


@pytest.mark.parametrize(("warmup", "least", "step"), [(18, 3, 20), (0, 1, 18), (0, 21, 22), (0, 53, 54), (60, 3, 62)])
def test_no_full_round_of_zero_one_adam_is_a_steady_step(warmup: int, least: int, step: int) -> None:
    """Counted from 0, steps 0 to 16, then 18, 20, ..., 48, then 52, 56, ... exchange whole gradients."""
    sync = {"compression": "zero-one-adam", "compression_warmup_steps": warmup}
    assert steady_step(job_of("dp=2 micro_batch=4", sync), least) == step
