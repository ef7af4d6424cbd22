"""What one layout saved, another takes over: a sample of ``check --matrix reshard``, and planted errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from meshwright.job.layout_text import parse_layout
from meshwright.prove.check import Prover
from meshwright.prove.matrix import Case
from meshwright.prove.pool import RankPool
from meshwright.prove.reshard import Proof, Resharded, check_reshard, pairs_of
from tests.small_jobs import small_job

Ranks = Callable[[int], RankPool]


def case(text: str, kv_heads: int = 2) -> Case:
    return Case(text, parse_layout(text), kv_heads)


def prove(ranks: Ranks, folder: Path, pairs: list[tuple[Case, Case]], dtype: str = "float64") -> list[Resharded]:
    found: list[Resharded] = []
    Proof(Prover(ranks), small_job("dp=1"), dtype, folder).run(pairs, found.append)
    assert len(found) == len(pairs)
    return found


def test_a_sample_of_pairs(ranks: Ranks, tmp_path: Path) -> None:
    """A ring over every kind of layout: each gives once and takes once."""
    ring = [
        case("dp=1 micro_batch=1"), case("dp=2 zero=3 micro_batch=2"), case("tp=4 micro_batch=4", 4),
        case("pp=2 schedule=zbv micro_batch=1"), case("dp=2 tp=2 zero=1 micro_batch=2"),
        case("dp=4 shard=2 zero=2 micro_batch=1"),
    ]  # fmt: skip
    results = prove(ranks, tmp_path, list(zip(ring, [*ring[1:], ring[0]], strict=True)))
    assert [result for result in results if not result.passed] == []
    assert all(result.samples_in_order and not result.wrong_tensors for result in results)
    assert max(result.max_relative_parameter_difference for result in results) < 1e-10


def test_delayed_layouts_take_over_from_each_other_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Two versions of the parameters are saved and taken over; other layouts would go on to other numbers."""
    assert all(giver.layout.delayed == taker.layout.delayed for giver, taker in pairs_of(8))
    two, four = case("pp=2 schedule=2bw micro_batch=1"), case("dp=2 pp=2 zero=1 schedule=2bw micro_batch=1")
    for result in prove(ranks, tmp_path, [(two, four), (four, two)]):
        assert result.passed, result


def test_one_to_three_ranks_over_two(ranks: Ranks, tmp_path: Path) -> None:
    proof = Proof(Prover(ranks), small_job("dp=1"), "float64", tmp_path)
    result = proof.chain(("dp=1 micro_batch=1", "dp=2 zero=3 micro_batch=1", "dp=3 zero=2 micro_batch=1"))
    assert result.passed, result
    assert result.label == "1 -> 2 -> 3 ranks"


def test_the_proof_sees_what_is_wrong(ranks: Ranks, tmp_path: Path) -> None:
    """A changed value in what was saved, another course, samples of another seed: each fails in its own way."""
    proof = Proof(Prover(ranks), small_job("dp=1"), "float64", tmp_path)
    giver, taker = case("dp=1 micro_batch=1"), case("dp=2 zero=1 micro_batch=2")
    saved = proof.saved(giver)
    assert not isinstance(saved, str)

    def verdict() -> Resharded:
        found: list[Resharded] = []
        proof.run([(giver, taker)], found.append)
        return found[0]

    state = numpy.load(saved.source.state, mmap_mode="r+")
    key = "exp_avg/layers.3.mlp.down.weight"
    place = saved.source.index[key][0] + 7
    before = float(state[place])
    state[place] += 1e-9
    state.flush()
    result = verdict()
    assert result.wrong_tensors == [key] and not result.passed
    state[place] = before
    state.flush()
    assert verdict().passed
    after = numpy.load(saved.source.after, mmap_mode="r+")
    after[saved.source.index["parameter/final_norm.weight"][0]] += 1e-6
    after.flush()
    result = verdict()
    assert result.worst == "parameter/final_norm.weight" and not result.passed and not result.wrong_tensors
    saved.losses[-1] *= 1 + 1e-8
    assert verdict().max_relative_loss_difference == pytest.approx(1e-8, rel=1e-3)
    proof.job = proof.job.model_copy(update={"train": proof.job.train.model_copy(update={"seed": 9})})
    assert not proof._in_order([[["00"] * 8]], 0)


def test_the_matrix_holds_all_pairs_of_small_layouts() -> None:
    """Every layout of the standard set with at most 4 ranks meets every other; those of 8 are sampled, both ways."""
    pairs = pairs_of(8)
    for delayed, least in ((False, 45), (True, 4)):
        chosen = [(a.layout, b.layout) for a, b in pairs if not a.tied and a.layout.delayed == delayed]
        small = {str(a) for a, _ in chosen if a.ranks <= 4}
        met = {(str(a), str(b)) for a, b in chosen if max(a.ranks, b.ranks) <= 4}
        assert met == {(a, b) for a in small for b in small} and len(small) >= least
    large = {str(a.layout) for a, _ in pairs if a.layout.ranks == 8}
    assert large and large == {str(b.layout) for _, b in pairs if b.layout.ranks == 8}


@pytest.mark.all
@pytest.mark.timeout(7200)
def test_every_pair() -> None:
    torch.set_num_threads(1)
    results = check_reshard(small_job("dp=1"), dtype="float64")
    assert [result for result in results if not result.passed] == [] and len(results) > 2800
