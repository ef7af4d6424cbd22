"""Predicted traffic against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.job.job import Job, job_from_values
from meshwright.plan import wire
from meshwright.plan.predict import predict
from tests.small_jobs import small_job

FLOAT32: dict[str, Any] = {"optimizer": {"name": "adamw"}, "precision": {"dtype": "float32"}}
Sends = dict[tuple[str, str, str], tuple[int, int, int]]


def sends(job: Job, rank: int = 0, **options: Any) -> Sends:
    """Payload, wire bytes and messages by axis, operation and phase."""
    entry = predict(job, [rank], **options).ranks[0]
    return {send.key: (send.payload, send.wire, send.messages) for send in entry.sends}


def test_one_device_sends_nothing() -> None:
    assert sends(small_job("dp=1 micro_batch=8")) == {}


def test_replicas_reduce_once_a_step() -> None:
    """dp=4 and two micro-batches each: one bucket of 32 N bytes / 8, rounded up to four elements."""
    job = small_job("dp=4 micro_batch=1", memory={"bucket_bytes": 1 << 30}, **FLOAT32)
    count = job.model_spec.parameter_count
    size = 4 * (-(-count // 4) * 4)
    assert sends(job, 2) == {
        ("dp", "all_reduce", "batch"): (8, 24, 1),
        ("dp", "reduce_scatter", "reduce"): (size, size * 3 // 4, 1),
        ("dp", "all_gather", "reduce"): (size // 4, size * 3 // 4, 1),
        ("world", "all_reduce", "metrics"): (8 * (2 + 8), 3 * 8 * (2 + 8), 1),
    }


def test_deterministic_mode_exchanges_after_every_micro_batch() -> None:
    job = small_job("dp=4 micro_batch=1", memory={"bucket_bytes": 1 << 30}, train={"deterministic": True}, **FLOAT32)
    size = 4 * (-(-job.model_spec.parameter_count // 4) * 4)
    found = sends(job)
    assert found["dp", "all_to_all", "reduce"] == (2 * size, 2 * size * 3 // 4, 2)
    assert found["dp", "all_gather", "reduce"] == (size // 4, size * 3 // 4, 1)
    assert found["world", "all_reduce", "metrics"] == (8 * (3 + 8) + 8, 3 * 8 * (3 + 8) + 24, 2)


def test_zero_1_of_16_bits_publishes_2_bytes_for_4_that_it_reduces() -> None:
    job = small_job(
        "dp=4 shard=2 zero=1 micro_batch=2", memory={"bucket_bytes": 1 << 30},
        optimizer={"name": "adamw"}, precision={"dtype": "bfloat16"},
    )  # fmt: skip
    size = -(-job.model_spec.parameter_count // 4) * 4
    found = sends(job)
    assert found["shard", "reduce_scatter", "reduce"] == (4 * size, 2 * size, 1)
    assert found["replicate", "reduce_scatter", "reduce"] == (2 * size, size, 1)
    assert found["replicate", "all_gather", "reduce"] == (size, size, 1)
    assert found["shard", "all_gather", "publish"] == (size, size, 1)


@pytest.mark.parametrize(
    ("layout", "rank", "stage", "forward", "backward"),
    [
        # two micro-batches, each gathers all; in backward again all but what is outside and the last layer
        ("dp=2 zero=3 micro_batch=2", 0, 0, (8, 2), (6, 0)),
        # 1F1B on two ranks, four micro-batches: F0 F1 B0 F2 B1 F3 B2 B3 on the first, F0 B0 F1 B1 ... on the last.
        # What is outside the layers is freed by each backward: gathered by F0, F2, F3, B3; on the last by every forward
        ("dp=2 pp=2 zero=3 micro_batch=1", 0, 0, (8, 3), (8, 1)),
        ("dp=2 pp=2 zero=3 micro_batch=1", 2, 1, (8, 4), (8, 0)),
        # GPipe: F0 F1 F2 F3 B0 B1 B2 B3
        ("dp=2 pp=2 zero=3 micro_batch=1 schedule=gpipe", 2, 1, (8, 1), (8, 3)),
    ],
)  # fmt: skip
def test_how_often_zero_3_gathers(
    layout: str, rank: int, stage: int, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """Counts of layers and of what is outside the layers."""
    job = small_job(layout, **FLOAT32)
    found = sends(job, rank)
    assert found["shard", "all_gather", "forward"][2] == sum(forward)
    assert found["shard", "all_gather", "backward"][2] == sum(backward)
    # Half the rows: norms 2 x 16, qkv 64, output 32 and down 32 of 48, gate and up 96; vocabulary 97 padded to 98.
    layer = 4 * (16 + 32 * 32 + 16 * 32 + 16 + 48 * 32 + 16 * 48)
    outside = {"dp=2 zero=3 micro_batch=2": 2 * 49 * 32 + 16}.get(layout, [49 * 32, 49 * 32 + 16][stage]) * 4
    assert found["shard", "all_gather", "forward"][0] == forward[0] * layer + forward[1] * outside
    assert found["shard", "all_gather", "backward"][0] == backward[0] * layer + backward[1] * outside


@pytest.mark.parametrize(
    ("recompute", "dropout", "again"),
    [("none", 0.0, (0, 0)), ("selective", 0.0, (0, 0)), ("full", 0.0, (2, 1)), ("full", 0.1, (2, 2))],
)
def test_tensor_parallel_by_hand(recompute: str, dropout: float, again: tuple[int, int]) -> None:
    """Two gathers and two reduce-scatters a layer forward (Korthikanti et al. 2022), four and two backward.

    Backward gathers the inputs of column-split products once more than in the paper, because only 1/t of them is kept.
    """
    job = small_job(f"tp=2 micro_batch=4 recompute={recompute}", model={"dropout": dropout}, **FLOAT32)
    tokens = 4 * 16
    part = 4 * tokens // 2 * 32
    expected = {
        ("all_gather", "forward"): 2 * 4 + 1,
        ("reduce_scatter", "forward"): 2 * 4 + 1,
        ("all_gather", "backward"): 2 * 4 + 1 + 2 * 4 + 1,
        ("reduce_scatter", "backward"): 2 * 4 + 1,
        ("all_gather", "recompute"): again[0] * 4,
        ("reduce_scatter", "recompute"): again[1] * 4,
    }
    found = sends(job)
    for (operation, phase), count in expected.items():
        payload = 2 * count * part * (2 if operation == "reduce_scatter" else 1)
        wired = 2 * count * part
        assert found.get(("tp", operation, phase), (0, 0, 0)) == (payload, wired, 2 * count)
    assert found["tp", "all_reduce", "forward"] == (2 * 4 * 3 * tokens, 2 * 4 * 3 * tokens, 4)
    assert found["tp", "all_reduce", "reduce"] == (4 * 9 * 32, 4 * 9 * 32, 1)


def test_split_backward_gathers_output_gradients_twice_but_not_on_the_first_stage() -> None:
    """pp=2, four layers, four micro-batches: 2 (columns) + 2 (rows) gathers a layer, and 2 rows again when split."""
    whole, split = (
        small_job(f"tp=2 pp=2 micro_batch=2 schedule={schedule}", **FLOAT32)
        for schedule in ("interleaved virtual=1", "zero-bubble virtual=1")
    )
    key = ("tp", "all_gather", "backward")
    assert sends(split, 0)[key] == sends(whole, 0)[key]
    assert sends(split, 2)[key][2] - sends(whole, 2)[key][2] == 4 * 2 * 2
    again = small_job("tp=2 pp=2 micro_batch=2 schedule=zero-bubble virtual=1 recompute=full", **FLOAT32)
    assert sends(again, 2)[key] == sends(whole, 2)[key], "a layer that is recomputed takes both parts together"


def test_pipeline_sends_what_leaves_the_rank() -> None:
    size = 8 * 16 * 32
    job = small_job("pp=2 micro_batch=1 schedule=interleaved virtual=2")
    assert sends(job, 0)["pp", "send", "forward"] == (8 * 2 * size, 8 * 2 * size, 16), "stages 0 and 2"
    assert sends(job, 0)["pp", "send", "backward"] == (8 * size, 8 * size, 8), "stage 2"
    folded = small_job("pp=2 micro_batch=1 schedule=zbv")
    assert sends(folded, 1)["pp", "send", "forward"] == (8 * size, 8 * size, 8), "stage 1 to 2 stays; 2 to 3 leaves"


def test_tied_copies_are_summed_range_by_range() -> None:
    """8-byte gradients of 97 x 32 elements, whole; over two shards and two copies: 3,104 / 2, cut at the pieces."""
    plain = small_job("pp=2 micro_batch=1", model={"tied": True})
    assert sends(plain)["embedding", "all_reduce", "reduce"] == (8 * 3104, 8 * 3104, 1)
    cut = small_job("dp=4 shard=2 zero=1 pp=2 micro_batch=1", model={"tied": True})
    assert sends(cut)["embedding", "all_reduce", "reduce"] == (8 * 1552, 8 * 1552, 2)
    assert ("embedding", "all_reduce", "reduce") not in sends(
        small_job("pp=2 schedule=zbv micro_batch=1", model={"tied": True})
    )


def test_nccl_rings() -> None:
    job = small_job("dp=4 micro_batch=1", **FLOAT32)
    assert sends(job, backend="nccl")["world", "all_reduce", "metrics"] == (80, 120, 1)
    assert sends(job, backend="gloo")["world", "all_reduce", "metrics"] == (80, 240, 1)


def test_all_reduce_by_size_and_order() -> None:
    """Up to 512 KiB over all peers one round; above, a ring, or two rounds of pieces in rank order."""
    assert wire.all_reduce(65536, 4, 3, "gloo").bytes == 2 * 262144
    assert wire.all_reduce(65537, 4, 3, "gloo").bytes == 4 * 262148 // 3
    assert wire.all_reduce(65537, 4, 3, "nccl").bytes == 4 * 262148 // 3
    assert wire.all_reduce(65537, 4, 3, "nccl", ordered=True).bytes == 2 * 262148
    two_rounds = [wire.all_reduce(1_000_001, 4, 3, "gloo", index=index, ordered=True).bytes for index in range(3)]
    assert two_rounds == [4 * (1_000_001 + 333_334)] * 2 + [4 * (1_000_001 + 333_333)]
    assert [wire.piece(9, 8, index) for index in range(8)] == [2, 2, 2, 2, 1, 0, 0, 0]


def test_what_cannot_be_trained_is_not_predicted() -> None:
    values: dict[str, Any] = {
        "model": {"preset": "gpt2"}, "data": {"sequence_length": 16}, "batch": {"global_size": 8},
    }  # fmt: skip
    unresolved = job_from_values(values)
    with pytest.raises(InputError, match="resolve the job"):
        predict(unresolved)
    experts = job_from_values({**values, "model": {"preset": "gpt2", "experts": 4, "experts_per_token": 1}})
    with pytest.raises(InputError, match="dense"):
        predict(experts.resolve(purpose="plan"))
    with pytest.raises(InputError, match="0 to 1"):
        predict(job_from_values({**values, "layout": "dp=2"}).resolve(purpose="plan"), [2])
