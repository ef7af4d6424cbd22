"""Drawn pairs of a shape and a layout: the closed forms say what the traced program does, to the byte.

``pytest -m all tests/ledger/test_predicted_equals_traced.py`` runs a thousand pairs and prints how many.
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.job.job import Job, job_from_values
from meshwright.job.layout import LOOPED_SCHEDULES, Recompute, Schedule
from meshwright.ledger.compare import Tolerances, compare
from meshwright.parallel import replicate
from meshwright.plan.predict import predict
from meshwright.prove.trace import trace
from tests.small_jobs import small_job

EXACT = Tolerances(activations=0.0, wire=0.0)
BLOCKS, BLOCK = 20, 50

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {
        "positions": "learned", "norm": "layernorm", "activation": "gelu_tanh", "gated": False,
        "qkv_bias": True, "output_bias": True, "mlp_bias": True,
    },
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mistral": {"sliding_window": 5},
    "gpt with dropout": {"positions": "learned", "norm": "layernorm", "gated": False, "dropout": 0.1},
}  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn, dp: int, tp: int, pp: int) -> str:
    words = [f"dp={dp} tp={tp} pp={pp} micro_batch={draw(st.sampled_from((1, 2, 4)))}"]
    zero = draw(st.integers(0, 3))
    if zero:
        shard = draw(st.sampled_from([degree for degree in range(1, dp + 1) if dp % degree == 0]))
        words.append(f"zero={zero} shard={shard}")
    words.append(f"recompute={draw(st.sampled_from(get_args(Recompute)))}")
    if pp > 1:
        schedule = draw(st.sampled_from(get_args(Schedule)))
        words.append(f"schedule={schedule}")
        if schedule in LOOPED_SCHEDULES:
            words.append(f"virtual={draw(st.integers(1, 2))}")
    return " ".join(words)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any job that can be trained, all of its numbers small."""
    tp, pp, dp = draw(st.sampled_from((1, 2, 3, 4))), draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 4, 8)))
    kv_heads = tp * draw(st.integers(1, 2))
    model = {
        "vocabulary": draw(st.integers(5, 200)),
        "hidden": 4 * draw(st.integers(1, 16)),
        "head_size": 2 * draw(st.integers(1, 6)),
        "layers": draw(st.integers(2 * pp, 2 * pp + 2)),
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 2)),
        "ffn_hidden": tp * draw(st.integers(1, 30)),
        "max_positions": 64,
        "tied": draw(st.booleans()),
    }
    values: dict[str, Any] = {
        "model": {**model, **KINDS[draw(st.sampled_from(sorted(KINDS)))]},
        "data": {
            "train": ["unused.txt"],
            "sequence_length": draw(st.sampled_from((4, 8, 12))),
            "document_mask": draw(st.booleans()),
        },
        "batch": {"global_size": draw(st.sampled_from((4, 8, 12, 16, 24)))},
        "optimizer": draw(st.sampled_from(({"name": "adamw"}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.9}))),
        "train": {"deterministic": draw(st.booleans())},
        "precision": {"dtype": draw(st.sampled_from(("float64", "float32", "bfloat16", "float16")))},
        "memory": {"bucket_bytes": draw(st.sampled_from((1 << 8, 1 << 12, 1 << 16, 1 << 22)))},
        "layout": draw(layouts(dp, tp, pp)),
    }
    try:
        return job_from_values(values).resolve()
    except InputError:
        assume(False)
        raise


def differences(job: Job, rank: int) -> list[str]:
    """What the predicted and the traced ledger of a rank do not agree on."""
    found = compare([predict(job, [rank], backend="gloo"), trace(job, [rank])], EXACT)
    return [f"{one.quantity}: {one.values}" for one in found if not one.agrees]


def hold(block: int, pairs: int) -> int:
    """Compare ``pairs`` drawn pairs, each on a drawn rank; how many were compared."""
    compared: Counter[str] = Counter()

    @seed(block)
    @settings(
        max_examples=pairs, database=None, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck)
    )
    @given(jobs(), st.data())
    def one_pair(job: Job, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, job.layout.ranks - 1), label="rank")
        assert differences(job, rank) == [], f"rank {rank} of {job.layout} of {job.model_spec}"
        compared["pairs"] += 1

    gc.collect()
    gc.freeze()  # every trace begins with a collection, which need not look at what is imported
    try:
        one_pair()
    finally:
        gc.unfreeze()
    return compared["pairs"]


def test_a_stage_between_others_gathers_nothing_in_vain() -> None:
    """FSDP2 itself would gather, once a step, a block of another micro-batch that nothing waits for."""
    job = small_job("dp=2 zero=3 pp=3 schedule=1f1b micro_batch=1", model={"layers": 6}, batch={"global_size": 6})
    stage_one = job.layout.dp
    assert differences(job, stage_one) == []


def test_some_pairs() -> None:
    assert hold(0, 8) == 8


@pytest.mark.all
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(1, BLOCKS + 1))
def test_a_thousand_pairs(block: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert hold(block, BLOCK) == BLOCK
    with capsys.disabled():
        print(f" {BLOCK} pairs equal, {block * BLOCK} in all")


def test_another_rule_for_buckets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job("dp=2 micro_batch=2", optimizer={"name": "adamw"}, precision={"dtype": "float32"})
    assert differences(job, 0) == []
    original = replicate.pack
    monkeypatch.setattr(replicate, "pack", lambda parameters, limit, alone: original(parameters, limit // 2, alone))
    assert any("messages" in difference for difference in differences(job, 0))


def test_more_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job("dp=3 zero=1 micro_batch=2", optimizer={"name": "adamw"}, precision={"dtype": "float32"})
    assert differences(job, 0) == []
    original = replicate.Copies.degree.fget
    assert original is not None
    monkeypatch.setattr(replicate.Copies, "degree", property(lambda copies: 4 * original(copies)))
    found = differences(job, 0)
    assert any("stores: gradients" in difference for difference in found)
    assert any("payload" in difference for difference in found)
