"""Faults that users of other systems reported, as right values: losses, norms, clipping, copies, skips."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch
from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.prove.parity import gradient_difference, parameter_difference
from meshwright.prove.pool import RankPool
from meshwright.train.trainer import StepReport, Trainer
from tests.small_jobs import checksum, my_batches, one_device, request, run, samples, small_job

Ranks = Callable[[int], RankPool]
SGD = {"optimizer": {"name": "sgd", "lr": 0.05}}


def batch_with_valid(counts: list[int], vocabulary: int = 97, length: int = 128) -> Batch:
    """One row for each count, with that many valid labels."""
    generator = torch.Generator().manual_seed(sum(counts))
    tokens = torch.randint(0, vocabulary, (len(counts), length), generator=generator)
    labels = torch.randint(0, vocabulary, (len(counts), length), generator=generator)
    for row, count in enumerate(counts):
        labels[row, count:] = -100
    positions = torch.arange(length).expand(len(counts), length).clone()
    return Batch(tokens, labels, positions, None, torch.arange(len(counts)))


def split_rows(batch: Batch, rows: slice) -> Batch:
    return Batch(batch.tokens[rows], batch.labels[rows], batch.positions[rows], None, batch.examples[rows])


def long_job(layout: str, **sections: dict[str, object]) -> Job:
    return small_job(layout, model={"max_positions": 128}, data={"sequence_length": 128}, **sections)


def step_on_rows(job: Job, counts: list[int], rows_by_dp_rank: list[list[slice]]) -> tuple[StepReport, list[bytes]]:
    """On a rank: one step on the given micro-batches of one batch."""
    whole = batch_with_valid(counts)
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        mine = [split_rows(whole, rows) for rows in rows_by_dp_rank[mesh.coordinate("dp")]]
        report = trainer.step(mine)
        return report, [piece.gradient.numpy().tobytes() for piece in trainer.owned]


def test_ten_and_a_hundred_valid_tokens_weigh_by_their_number(ranks: Ranks) -> None:
    """Two micro-batches of 10 and 100 valid tokens equal one batch of both; loss = sum / 110."""
    job = long_job("dp=1 micro_batch=1", batch={"global_size": 2}, **SGD)
    apart, gradients_apart = ranks(1).run(step_on_rows, job, [10, 100], [[slice(0, 1), slice(1, 2)]])[0]
    together, gradients_together = ranks(1).run(step_on_rows, job, [10, 100], [[slice(0, 2)]])[0]
    assert apart.valid_tokens == together.valid_tokens == 110
    assert apart.loss == pytest.approx(together.loss, rel=1e-12)
    assert apart.gradient_norm == pytest.approx(together.gradient_norm, rel=1e-12)
    for a, b in zip(gradients_apart, gradients_together, strict=True):
        np.testing.assert_allclose(np.frombuffer(a), np.frombuffer(b), rtol=1e-6, atol=1e-15)


def test_five_and_fifty_valid_tokens_on_two_ranks_equal_fifty_five_on_one(ranks: Ranks) -> None:
    two = long_job("dp=2 micro_batch=1", batch={"global_size": 2}, **SGD)
    one = long_job("dp=1 micro_batch=2", batch={"global_size": 2}, **SGD)
    spread = ranks(2).run(step_on_rows, two, [5, 50], [[slice(0, 1)], [slice(1, 2)]])
    alone, _ = ranks(1).run(step_on_rows, one, [5, 50], [[slice(0, 2)]])[0]
    for report, _gradients in spread:
        assert report.valid_tokens == 55
        assert report.loss == pytest.approx(alone.loss, rel=1e-12)
        assert report.gradient_norm == pytest.approx(alone.gradient_norm, rel=1e-12)


def test_the_gradient_norm_does_not_depend_on_accumulation(ranks: Ranks) -> None:
    norms = [run(ranks, small_job(f"dp=1 micro_batch={size}"), 2).norms for size in (8, 4, 2, 1)]
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=1e-10)


def test_sgd_gradients_are_divided_once_whatever_dp_is(ranks: Ranks) -> None:
    """A gradient divided twice hides behind AdamW; SGD and the norm show it."""
    expected = one_device(small_job("dp=1 micro_batch=2", **SGD))
    for layout in ("dp=2 micro_batch=2", "dp=4 micro_batch=2", "dp=4 zero=2 micro_batch=2"):
        found = run(ranks, small_job(layout, **SGD))
        assert found.norms == pytest.approx(expected.norms, rel=1e-11)
        assert parameter_difference(found.parameters, expected.parameters, 0.15)[0] < 1e-12


def test_three_sequences_on_two_ranks_equal_three_on_one(ranks: Ranks) -> None:
    """Unequal local batches, 2 and 1: a plain average of the two ranks would be wrong."""
    expected = one_device(small_job("dp=1 micro_batch=1", batch={"global_size": 3}))
    for zero in (0, 1, 2, 3):
        found = run(ranks, small_job(f"dp=2 zero={zero} micro_batch=1", batch={"global_size": 3}))
        assert gradient_difference(found.gradients[0], expected.gradients[0])[0] < 1e-12


@pytest.mark.parametrize("layout", ["pp=2 micro_batch=1", "tp=2", "dp=2 tp=2", "dp=2 zero=3", "dp=4 shard=2 zero=2"])
def test_all_ranks_clip_by_the_norm_of_the_whole_model(ranks: Ranks, layout: str) -> None:
    """``run`` refuses ranks that report different norms; the norm is that of one device, and the clipped update too."""
    clip = {"optimizer": {"name": "sgd", "lr": 0.05, "clip_norm": 0.3}}
    expected = one_device(small_job("dp=1 micro_batch=1", **clip))
    found = run(ranks, small_job(layout, **clip))
    assert min(expected.norms) > 0.3, "clipping must be active"
    assert found.norms == pytest.approx(expected.norms, rel=1e-11)
    assert parameter_difference(found.parameters, expected.parameters, 0.15)[0] < 1e-12


@pytest.mark.parametrize(
    "layout", ["pp=2 micro_batch=1", "pp=2 micro_batch=1 schedule=zbv", "dp=2 pp=2 zero=1 micro_batch=1"]
)
def test_tied_copies_stay_equal_for_twenty_steps(ranks: Ranks, layout: str) -> None:
    """Copies of the embedding on two stages: ``assemble`` refuses copies that differ in a bit."""
    tied = {"model": {"tied": True}}
    expected = one_device(small_job("dp=1 micro_batch=1", **tied), 20)
    found = run(ranks, small_job(layout, **tied), 20)
    assert parameter_difference(found.parameters, expected.parameters, 1.0)[0] < 1e-10


def test_norm_gradients_under_sequence_parallelism_are_whole_and_equal(ranks: Ranks) -> None:
    """Not 1/tp of it, and the same bits on every tp rank (``assemble`` compares the copies of parameters)."""
    expected = one_device(small_job("dp=1 micro_batch=8"))
    found = run(ranks, small_job("tp=2 micro_batch=8"))
    for name in ("layers.0.attention_norm.weight", "layers.3.mlp_norm.weight", "final_norm.weight"):
        np.testing.assert_allclose(found.gradients[0][name], expected.gradients[0][name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("layout", ["dp=2 zero=0", "dp=4 zero=3", "dp=4 shard=2 zero=3", "tp=2", "pp=4 micro_batch=1"])
def test_every_layout_starts_from_the_same_bits(ranks: Ranks, layout: str) -> None:
    still = {"optimizer": {"name": "sgd", "lr": 0.0}}
    expected = one_device(small_job("dp=1 micro_batch=1", **still), 1)
    found = run(ranks, small_job(layout, **still), 1)
    for name, value in expected.parameters.items():
        assert np.array_equal(found.parameters[name], value), name


@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "pp=2 micro_batch=1", "dp=2 tp=2 zero=2"])
def test_dropout_masks_are_those_of_one_device(ranks: Ranks, layout: str) -> None:
    """The same inside a tp group, different across dp ranks and slices: else the losses could not agree."""
    drop = {"model": {"dropout": 0.2}}
    expected = one_device(small_job("dp=1 micro_batch=1", **drop))
    found = run(ranks, small_job(layout, **drop))
    assert found.losses == pytest.approx(expected.losses, rel=1e-11)
    assert parameter_difference(found.parameters, expected.parameters, 0.15)[0] < 1e-11


def consume_randomness_and_train(job: Job) -> float:
    """On a rank: rank 0 draws from the global generator, as a data loader might."""
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        if mesh.rank == 0:
            torch.rand(100)
        return trainer.step(my_batches(job, mesh, 0)).loss


def test_a_loader_that_draws_random_numbers_on_one_rank_changes_no_mask(ranks: Ranks) -> None:
    job = small_job("tp=2 micro_batch=8", model={"dropout": 0.2})
    assert ranks(2).run(consume_randomness_and_train, job)[0] == run(ranks, job, 1).losses[0]


def step_with_infinity(job: Job, bad_rank: int) -> tuple[bool, float, bool, int]:
    """On a rank: one rank's gradient turns infinite in the first step; the second step is sound."""
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        before = checksum(trainer)

        def spoil(owned: list[object]) -> None:
            if mesh.rank == bad_rank and trainer.step_number == 0:
                counted = [piece for piece in trainer.owned if piece.counted and piece.gradient.numel()]
                counted[0].gradient.view(-1)[0] = math.inf

        trainer.after_reduction.append(spoil)
        report = trainer.step(my_batches(job, mesh, 0))
        unchanged = checksum(trainer) == before and trainer.optimizer.steps == 0
        trainer.step(my_batches(job, mesh, 1))
        return report.applied, trainer.loss_scale.value, unchanged, trainer.optimizer.steps


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2",
        "dp=2 zero=1",
        "dp=2 zero=2",
        "dp=2 zero=3",
        "tp=2",
        "pp=2 micro_batch=1",
        "dp=2 tp=2",
        "dp=2 pp=2 zero=1 micro_batch=1",
    ],
)
def test_an_infinity_on_one_rank_makes_all_ranks_skip(ranks: Ranks, layout: str) -> None:
    """One decision: nobody steps, the scale is the same everywhere (4.0 against 2.0 cannot be), nothing hangs."""
    job = small_job(
        layout,
        precision={"dtype": "float16", "loss_scale_initial": 8.0},
        train={"nonfinite": "skip"},
    )
    for bad_rank in range(job.layout.ranks):
        results = ranks(job.layout.ranks).run(step_with_infinity, job, bad_rank)
        assert results == [(False, 4.0, True, 1)] * job.layout.ranks


def test_thirty_layers_on_four_stages_are_all_there(ranks: Ranks) -> None:
    deep = {"model": {"layers": 30, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn_hidden": 16}}
    expected = one_device(small_job("dp=1 micro_batch=2", **deep), 1)
    found = run(ranks, small_job("pp=4 micro_batch=2", **deep), 1)
    assert len({name.split(".")[1] for name in found.parameters if name.startswith("layers.")}) == 30
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)


def test_too_few_kv_heads_name_the_legal_degrees() -> None:
    with pytest.raises(InputError, match="tp=4 does not divide 2 key/value heads; use 1 or 2"):
        small_job("tp=4")


def test_the_learning_rate_does_not_depend_on_the_number_of_ranks(ranks: Ranks) -> None:
    cosine = {"optimizer": {"name": "adamw", "lr": 0.01, "schedule": "cosine", "warmup_steps": 3}}
    expected = [ranks(1).run(rates, small_job("dp=1 micro_batch=8", **cosine))[0]]
    expected += [ranks(n).run(rates, small_job(f"dp={n}", **cosine))[0] for n in (2, 4)]
    assert expected[0] == expected[1] == expected[2]


def rates(job: Job) -> list[float]:
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        return [trainer.step(my_batches(job, mesh, step)).learning_rate for step in range(4)]


@pytest.mark.parametrize("window", [4])
def test_a_sliding_window_is_kept_under_tensor_and_pipeline_parallelism(ranks: Ranks, window: int) -> None:
    sliding = {"model": {"sliding_window": window}}
    expected = one_device(small_job("dp=1 micro_batch=1", **sliding))
    full = one_device(small_job("dp=1 micro_batch=1"))
    assert expected.losses[0] != full.losses[0]
    for layout in ("tp=2 micro_batch=1", "pp=2 micro_batch=1"):
        assert run(ranks, small_job(layout, **sliding)).losses == pytest.approx(expected.losses, rel=1e-11)


def test_samples_are_the_same_for_any_dp() -> None:
    job = small_job("dp=1 micro_batch=1")
    again = samples(small_job("dp=4 micro_batch=1"))
    rows = np.arange(8)
    assert np.array_equal(samples(job).rows(rows).tokens, again.rows(rows).tokens)
    assert request(job).steps == 3
