"""The predicted ledger against the program itself, traced on fake tensors: state and traffic to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.comm import collectives
from meshwright.parallel import buckets, replicate
from tests.ledger.exactly import differences
from tests.ledger.random_jobs import random_job, random_rank
from tests.small_jobs import small_job


@pytest.mark.parametrize("seed", [*range(1, 5), *(pytest.param(seed, marks=pytest.mark.all) for seed in range(5, 200))])
def test_random_shapes_and_layouts(seed: int) -> None:
    job = random_job(seed)
    rank = random_rank(job, seed)
    assert differences(job, rank) == [], f"rank {rank} of {job.layout}: {job}"


def test_sizes_at_which_other_algorithms_run() -> None:
    """Above 512 KiB all-reduces go another way: the loss's maxima, and replicated gradients in uneven pieces."""
    model = {
        "vocabulary": 97, "hidden": 25, "head_size": 2, "heads": 3, "kv_heads": 3, "ffn_hidden": 9, "layers": 1,
        "positions": "learned", "max_positions": 32768,
    }  # fmt: skip
    job = small_job(
        "tp=3 micro_batch=36", model=model, data={"sequence_length": 2048}, batch={"global_size": 36},
        precision={"dtype": "bfloat16"},
    )  # fmt: skip
    assert differences(job, 0) == []
    assert differences(job, 2) == []


@pytest.mark.all
def test_a_world_whose_losses_are_summed_in_a_ring() -> None:
    job = small_job("dp=512 micro_batch=1", model={"layers": 1}, batch={"global_size": 1024})
    assert differences(job, 300) == []


def _smaller_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    original = buckets.pack

    def pack(parameters: Any, limit: int, alone: frozenset[str]) -> Any:
        return original(parameters, limit // 2, alone)

    monkeypatch.setattr(replicate, "pack", pack)


def _more_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = buckets.Copies.__dict__["degree"].fget
    monkeypatch.setattr(buckets.Copies, "degree", property(lambda self: 4 * original(self)))


def _always_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "ONE_ROUND_BYTES", 0)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (_smaller_buckets, "messages"),
        (_more_padding, "stores: gradients"),
        (_always_two_rounds, "wire"),
    ],
)
def test_a_change_of_the_program_alone_shows(monkeypatch: pytest.MonkeyPatch, change: Any, shown: str) -> None:
    job = small_job("dp=3 zero=1 micro_batch=2", optimizer={"name": "adamw"}, precision={"dtype": "float32"})
    assert differences(job, 0) == []
    change(monkeypatch)
    assert any(shown in difference for difference in differences(job, 0))
