"""Predicted bytes of parameters, gradients and optimizer state against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.job.job import Job, job_from_values
from meshwright.plan.explain import explain
from meshwright.plan.place import LocalTensor, Place
from meshwright.plan.predict import predict
from meshwright.plan.state import division, lane_bytes, packed, units
from tests.small_jobs import small_job

TINY: dict[str, Any] = {
    # 97 x 8 embedding and head, one layer of norm 8, qkv 24 x 8, output 8 x 8, norm 8, up 12 x 8, down 8 x 12, norm 8
    "vocabulary": 97, "hidden": 8, "layers": 1, "heads": 2, "kv_heads": 2, "ffn_hidden": 12, "gated": False,
}  # fmt: skip
ELEMENTS = 97 * 8 + 8 + 24 * 8 + 8 * 8 + 8 + 12 * 8 + 8 * 12 + 8 + 97 * 8


def tiny(layout: str, **sections: dict[str, Any]) -> Job:
    return small_job(layout, model=TINY, **{"optimizer": {"name": "adamw"}, **sections})


def state(job: Job, rank: int = 0) -> tuple[int, int, int]:
    stores = predict(job, [rank]).ranks[0].stores
    return stores.parameters, stores.gradients, stores.optimizer


@pytest.mark.parametrize(
    ("zero", "published"),
    [(0, 120e9), (1, 31.4e9), (2, 16.6e9), (3, 1.88e9)],
)
def test_model_state_of_the_zero_paper(zero: int, published: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks, 2 + 2 + 12 bytes a parameter.

    We sum gradients in 4 bytes where the paper has 2, and where we gather 16-bit parameters for each use (ZeRO-2, 3)
    the paper keeps them: both are put right here.
    """
    model = {"vocabulary": 50257, "hidden": 4096, "layers": 36, "heads": 32, "ffn_hidden": 16384, "gated": False}
    job = job_from_values(
        {
            "model": model,
            "data": {"sequence_length": 1024},
            "batch": {"global_size": 64},
            "precision": {"dtype": "bfloat16"},
            "layout": f"dp=64 zero={zero} micro_batch=1",
        }
    ).resolve(purpose="plan")
    count = job.model_spec.parameter_count
    parameters, gradients, optimizer = state(job)
    kept = {0: 0, 1: 0, 2: 2 * count, 3: 2 * count // 64}[zero]
    as_published = (parameters + gradients // 2 + optimizer + kept) * 7.5e9 / count
    assert as_published == pytest.approx(published, rel=5e-3)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        # parameters with masters, gradients, two moments: bytes an element
        ("bfloat16", (2 + 4, 4, 8)),
        ("float16", (2 + 4, 4, 8)),
        ("float32", (4, 4, 8)),
        ("float64", (8, 8, 16)),
    ],
)
def test_bytes_an_element_on_one_rank(dtype: str, expected: tuple[int, int, int]) -> None:
    """16-bit training: 18 bytes, the 16 of mixed precision with float32 gradients instead of 16-bit ones."""
    job = tiny("dp=1 micro_batch=1", precision={"dtype": dtype})
    assert state(job) == tuple(each * ELEMENTS for each in expected)


@pytest.mark.parametrize(("momentum", "numbers"), [(0.0, 0), (0.9, 1)])
def test_sgd_keeps_its_momentum_alone(momentum: float, numbers: int) -> None:
    job = small_job("dp=1 micro_batch=1", model=TINY, optimizer={"momentum": momentum}, precision={"dtype": "float32"})
    assert state(job)[2] == 4 * numbers * ELEMENTS


def test_buckets_take_tensors_from_the_end_up_to_their_size() -> None:
    def tensor(name: str, count: int, *, embedding: bool = False) -> LocalTensor:
        return LocalTensor(name, (count,), None, False, embedding)

    tensors = [
        tensor("a", 50, embedding=True),
        *(tensor(name, size) for name, size in zip("bcdef", (30, 90, 10, 60, 40), strict=True)),
    ]

    def names(limit: int, *, apart: bool) -> list[str]:
        return ["".join(tensor.name for tensor in bucket) for bucket in packed(tensors, limit, apart)]

    assert names(100, apart=False) == ["fe", "dc", "ba"]
    assert names(40, apart=False) == ["f", "e", "d", "c", "b", "a"]
    assert names(1000, apart=False) == ["fedcba"]
    assert names(1000, apart=True) == ["a", "fedcb"], "a copy of a tied embedding stands alone"


def test_zero_1_by_hand() -> None:
    """One bucket of 2,024 elements over 3 ranks: padded to 2,025, chunks of 675, the last with one of padding."""
    assert ELEMENTS == 2024
    job = tiny("dp=3 zero=1 micro_batch=1", precision={"dtype": "bfloat16"}, memory={"bucket_bytes": 1 << 20})
    padded = 2025
    for rank, owned in ((0, 675), (1, 675), (2, 674)):
        assert state(job, rank) == (2 * padded + 4 * 675, 4 * padded, 8 * owned)


def test_deterministic_mode_sums_pieces_in_buffers_of_their_own() -> None:
    plain = tiny("dp=3 micro_batch=1", precision={"dtype": "float32"})
    fixed = tiny("dp=3 micro_batch=1", precision={"dtype": "float32"}, train={"deterministic": True})
    assert sum(unit.times for unit in units(plain, Place(plain, 0))) == 1
    assert state(fixed)[1] - state(plain)[1] == 4 * 2025 // 3


def test_zero_3_pads_rows_by_hand() -> None:
    """Over 3 ranks 97 rows are 33, 33, 31; 8 rows 3, 3, 2; 24 and 12 rows divide."""
    job = tiny("dp=3 zero=3 micro_batch=1", precision={"dtype": "bfloat16"})
    rows = 33 * 8 + 3 + 8 * 8 + 3 * 8 + 3 + 4 * 8 + 3 * 12 + 3 + 33 * 8
    last = 31 * 8 + 2 + 8 * 8 + 2 * 8 + 2 + 4 * 8 + 2 * 12 + 2 + 31 * 8
    assert [state(job, rank) for rank in range(3)] == [
        (4 * rows, 4 * rows, 8 * rows),
        (4 * rows, 4 * rows, 8 * rows),
        (4 * rows, 4 * rows, 8 * last),
    ]


def test_copies_of_shards_pad_the_sums_to_their_number() -> None:
    job = tiny("dp=6 shard=3 zero=2 micro_batch=1", precision={"dtype": "float32"})
    layer, rest = 3 + 8 * 8 + 3 * 8 + 3 + 4 * 8 + 3 * 12, 33 * 8 + 3 + 33 * 8
    assert (layer % 2, rest % 2) == (0, 1)
    assert state(job)[:2] == (4 * (layer + rest), 4 * (layer + rest + 1))


def test_tensor_parallel_ranks_hold_their_part_and_pad_the_vocabulary() -> None:
    job = tiny("tp=2 micro_batch=2", precision={"dtype": "float32"})
    part = 49 * 8 + 8 + 12 * 8 + 8 * 4 + 8 + 6 * 8 + 8 * 6 + 8 + 49 * 8
    assert state(job) == (4 * part, 4 * part, 8 * part)


def test_a_tied_embedding_stands_once_on_one_stage_and_twice_on_two() -> None:
    one = small_job("dp=1 micro_batch=1", model={"tied": True})
    two = small_job("pp=2 micro_batch=1", model={"tied": True})
    ledgers = [predict(job) for job in (one, two)]
    values = [sum(entry.stores.parameters for entry in ledger.ranks) // 8 for ledger in ledgers]
    assert values[0] == one.model_spec.parameter_count
    assert values[1] - values[0] == 97 * 32


def test_lanes_are_rows_for_the_ends_of_ranges() -> None:
    """Three ranks of ZeRO-1 with AdamW: rank 0 has the last 675 elements: head 97 x 8 cut, nothing else."""
    job = tiny("dp=3 zero=1 micro_batch=1", precision={"dtype": "float32"}, memory={"bucket_bytes": 1 << 20})
    place = Place(job, 0)
    assert division(job, place).shards == 3
    assert [piece.count for unit in units(job, place) for piece in unit.ranges()] == [675]
    assert lane_bytes(job, place) == 4 * 64 * 4, "675 is no multiple of 64: values, gradients and two moments of a row"


@pytest.mark.parametrize("layout", ["dp=4 zero=1 micro_batch=1", "dp=4 shard=2 zero=3", "tp=2 pp=2 micro_batch=1"])
def test_what_is_explained_adds_up_to_the_ledger(layout: str) -> None:
    job = small_job(layout, optimizer={"name": "adamw"}, precision={"dtype": "bfloat16"})
    sums: dict[str, int] = {}
    for quantity, formula, value in explain(job, 1):
        assert formula
        sums[quantity] = sums.get(quantity, 0) + value
    entry = predict(job, [1]).ranks[0]
    for name in ("parameters", "gradients", "optimizer", "activations", "temporary", "peak"):
        assert sums[f"stores: {name}"] == getattr(entry.stores, name)
    for name in ("forward", "backward", "recompute"):
        assert sums[f"computes: {name}"] == getattr(entry.computes, name)
    for send in entry.sends:
        for name in ("payload", "wire", "messages"):
            assert sums[f"sends: {' '.join(send.key)}: {name}"] == getattr(send, name)


def test_405_billion_parameters_on_16384_ranks() -> None:
    """Every rank is there, in order, and pipeline ranks of the same shapes share their numbers."""
    job = job_from_values(
        {
            "model": {"preset": "llama3-405b"},
            "data": {"sequence_length": 8192},
            "batch": {"global_size": 2048},
            "precision": {"dtype": "bfloat16"},
            "layout": "dp=128 tp=8 pp=16 zero=1 micro_batch=1",
        }
    ).resolve(purpose="plan")
    ledger = predict(job)
    assert [entry.rank for entry in ledger.ranks] == list(range(16384))
    some = [0, 1, 1023, 1024, 9000, 16383]
    assert [predict(job, some).rank(rank) for rank in some] == [ledger.rank(rank) for rank in some]
    # Each of 16 x 8 x 128 ranks updates its own part; the norms stand on all 8 tensor parallel ranks.
    norms = 126 * 2 * 16384 + 16384
    total = sum(entry.stores.optimizer for entry in ledger.ranks)
    assert total == 8 * (job.model_spec.parameter_count + 7 * norms)
