"""Codecs: bytes counted, errors bounded, expectations right."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.comm.copies import Span
from meshwright.job.adam_rounds import full_round
from meshwright.sync.codec import Codec, pack_bits, unpack_bits
from meshwright.sync.compress_adam import OneBitMomentum
from meshwright.sync.compress_blocks import BlockScaled
from meshwright.sync.compress_cast import Cast
from meshwright.sync.compress_dgc import kept_count, sparsity_at
from meshwright.sync.compress_powersgd import plan_of, saves
from meshwright.sync.compress_qsgd import Qsgd
from meshwright.sync.compress_sign import Sign
from meshwright.sync.memory import Memories
from meshwright.train.compressing import codec_of, method_of
from tests.small_jobs import unresolved_job

CODECS: list[Codec] = [
    Cast("fp16"), Cast("bf16"), Sign(32), Sign(7, "l2"), Qsgd(16, 2), Qsgd(64, 4), Qsgd(5, 8),
    BlockScaled(32), BlockScaled(9, "fp8"),
]  # fmt: skip
WIDE = (torch.float32, torch.float64)


def numbers(rows: int, count: int, seed: int, wide: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers over many magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, count, generator=generator, dtype=torch.float64)
    values *= torch.exp(2 * torch.randn(rows, count, generator=generator, dtype=torch.float64))
    values[torch.rand(rows, count, generator=generator) < 0.1] = 0.0
    return values.to(wide)


def row_bytes(codec: Codec, count: int, wide: torch.dtype) -> int:
    """Its codes, packed, and a scale a block."""
    if isinstance(codec, Cast):
        return 2 * count
    assert isinstance(codec, Sign | Qsgd | BlockScaled)
    bits = codec.bits if isinstance(codec, Qsgd) else 1 if isinstance(codec, Sign) else 8
    return -(-count * bits // 8) + -(-count // codec.block) * wide.itemsize


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(rows=st.integers(1, 4), count=st.integers(1, 70), seed=st.integers(0, 10**6), wide=st.sampled_from(WIDE))
def test_payload_is_what_it_says(codec: Codec, rows: int, count: int, seed: int, wide: torch.dtype) -> None:
    values = numbers(rows, count, seed, wide)
    payload = codec.encode(values, 3)
    assert payload.dtype == torch.uint8
    assert payload.shape == (rows, row_bytes(codec, count, wide))
    assert codec.decode(payload, count, wide).shape == (rows, count)
    assert codec.decode(payload, count, wide).dtype == wide


@pytest.mark.parametrize("codec", [Sign(1), Sign(1, "l2"), Qsgd(1, 4), BlockScaled(1), BlockScaled(1, "fp8")], ids=str)
def test_one_element_a_block_loses_nothing(codec: Codec) -> None:
    values = numbers(3, 40, 5)
    decoded = codec.decode(codec.encode(values, 1), 40, torch.float64)
    assert torch.allclose(decoded, values, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_arrives_so(codec: Codec, bad: float) -> None:
    values = numbers(1, 20, 2)
    values[0, 3] = bad
    assert not codec.decode(codec.encode(values, 1), 20, torch.float64).isfinite().all()


@given(count=st.integers(1, 60), seed=st.integers(0, 10**6), block=st.integers(2, 20))
def test_rounding_stays_within_its_bound(count: int, seed: int, block: int) -> None:
    values = numbers(2, count, seed)
    for kind, relative in (("fp16", 2.0**-11), ("bf16", 2.0**-8)):
        cast = Cast(kind)  # type: ignore[arg-type]
        error = (cast.decode(cast.encode(values, 0), count, torch.float64) - values).abs()
        assert (error <= relative * (1 + 1e-6) * values.abs() + 2.0**-25).all()
    padded = torch.nn.functional.pad(values, (0, -count % block)).view(2, -1, block)
    largest = padded.abs().amax(2).repeat_interleave(block, dim=1)[:, :count]
    for kind, scale in (("int8", largest / 127), ("fp8", largest / 448)):
        codec = BlockScaled(block, kind)  # type: ignore[arg-type]
        error = (codec.decode(codec.encode(values, 0), count, torch.float64) - values).abs()
        bound = scale / 2 if kind == "int8" else torch.maximum(2.0**-4 * values.abs(), scale * 2.0**-10)
        assert (error <= bound * (1 + 1e-12)).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_numbers_on_the_grid_come_through(kind: str) -> None:
    grid = torch.arange(-127, 128, dtype=torch.float64) if kind == "int8" else (
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    )  # fmt: skip
    values = (grid[grid.isfinite()] * 0.25).view(1, -1)
    codec = BlockScaled(values.shape[1], kind)  # type: ignore[arg-type]
    assert torch.equal(codec.decode(codec.encode(values, 0), values.shape[1], torch.float64), values)


@given(count=st.integers(1, 50), seed=st.integers(0, 10**6))
def test_signs_contract_by_the_formula_and_keep_the_length(count: int, seed: int) -> None:
    values = numbers(1, count, seed)
    found = Sign(count).decode(Sign(count).encode(values, 0), count, torch.float64)
    square = values.square().sum()
    expected = square - values.abs().sum() ** 2 / count
    assert float((found - values).square().sum()) == pytest.approx(float(expected), rel=1e-9, abs=1e-9 * float(square))
    long = Sign(count, "l2").decode(Sign(count, "l2").encode(values, 0), count, torch.float64)
    assert float(long.norm()) == pytest.approx(float(values.norm()), rel=1e-12)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_unbiased_and_within_its_variance(bits: int) -> None:
    codec, count = Qsgd(8, bits), 24  # type: ignore[arg-type]
    values = numbers(1, count, 11)
    # Exact expectation: a number has two outcomes, whose probabilities the drawn numbers 0 and (almost) 1 bracket.
    high = codec.decode(codec.encode_with(values, torch.zeros_like(values)), count, torch.float64)
    low = codec.decode(codec.encode_with(values, torch.ones_like(values)), count, torch.float64)
    lengths = values.view(1, -1, 8).norm(dim=2).repeat_interleave(8, dim=1)
    scaled = values.abs() / lengths * codec.levels
    chance = scaled - scaled.floor()
    assert torch.allclose(chance * high + (1 - chance) * low, values, rtol=1e-12, atol=1e-14)
    variance = (chance * (high - values).square() + (1 - chance) * (low - values).square()).view(1, -1, 8).sum(2)
    bound = min(8 / codec.levels**2, math.sqrt(8) / codec.levels) * values.view(1, -1, 8).square().sum(2)
    assert (variance <= bound * (1 + 1e-12)).all()
    # And the draw follows those probabilities: many keys, elements far from each other.
    drawn = torch.stack([codec.decode(codec.encode(values, key), count, torch.float64) for key in range(600)])
    spread = (high - low).abs() / math.sqrt(600)
    assert ((drawn.mean(0) - values).abs() <= 4 * spread / 2 + 1e-12).all()
    assert torch.equal(codec.encode(values, 5), codec.encode(values, 5))
    assert not torch.equal(codec.encode(values, 5), codec.encode(values, 6))


@given(bits=st.sampled_from([1, 2, 4, 8]), count=st.integers(1, 40), seed=st.integers(0, 999))
def test_packing(bits: int, count: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (2, count), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack_bits(codes, bits)
    assert packed.shape[1] == -(-count * bits // 8)
    assert torch.equal(unpack_bits(packed, bits, count), codes)


def test_sparsity_rises_as_in_the_paper() -> None:
    assert [sparsity_at(step, 0.999, 8) for step in (0, 1, 2, 4, 6, 7, 8, 99)] == [
        0.75, 0.75, 0.9375, 0.984375, 0.996, 0.996, 0.999, 0.999,
    ]  # fmt: skip
    assert sparsity_at(0, 0.5, 8) == 0.5  # never above the final one
    assert [kept_count(1000, s) for s in (0.0, 0.999, 0.9995, 0.5)] == [1000, 1, 1, 500]


def test_full_rounds() -> None:
    assert [step for step in range(6) if full_round("one-bit-adam", step, 3)] == [0, 1, 2]
    rounds = [step for step in range(120) if full_round("zero-one-adam", step, 0)]
    gaps = [b - a for a, b in pairwise(rounds)]
    assert rounds[:17] == list(range(17))
    assert gaps == sorted(gaps)
    assert set(gaps) == {1, 2, 4}


def test_matrices_and_the_rest() -> None:
    spans = [Span("a", 3, (8, 6)), Span("b", 51, (7,)), Span("c", 58, (2, 3))]
    plan = plan_of(66, spans, 1, 1.0)
    assert [(matrix.start, matrix.stop) for matrix in plan.matrices] == [(3, 51), (58, 64)]
    assert plan.dense == ((0, 3), (51, 58), (64, 66))
    assert plan.second_count == 6 + 3
    assert not saves(8, 6, 4, 1.0) and saves(8, 6, 4, 0.0)


@pytest.mark.parametrize("bits", [2, 8])
def test_levels_take_the_bits_of_the_job(bits: Literal[2, 8]) -> None:
    job = unresolved_job("dp=2", sync__compression="qsgd", sync__compression_bits=bits)
    assert codec_of(job) == Qsgd(job.sync.compression_block, bits)


def test_momentum_that_travels_is_adam_s_of_the_job() -> None:
    job = unresolved_job("dp=2", sync__compression="one-bit-adam", optimizer__betas=[0.8, 0.9])
    method = method_of(job, Memories())
    assert isinstance(method, OneBitMomentum) and method.beta == 0.8
