"""The counter-based generator: published answers, slices, distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.model.philox import derive_key, normal, philox4x32, uniform, words

# Random123's kat_vectors, lines "philox4x32 10".
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
KEY = derive_key(7, "layers.0.mlp.up.weight")


def hexes(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_random123_known_answers(counter: str, key: str, answer: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in hexes(counter))
    k0, k1 = hexes(key)
    assert [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == hexes(answer)


def test_words_are_the_counter_s_words_in_order() -> None:
    found = words((0, 0), torch.tensor([0]), 4)
    assert found.tolist() == [hexes(KNOWN_ANSWERS[0][2])]


def one(draw: object, index: int) -> Tensor:
    return draw(KEY, torch.tensor([index]), 1)[0, 0]  # type: ignore[operator]


@settings(max_examples=60, deadline=None)
@given(
    start=st.one_of(st.integers(0, 40), st.integers(2**34 - 40, 2**34 + 40), st.integers(2**40, 2**41)),
    width=st.integers(1, 23),
)
def test_any_slice_holds_the_same_elements(start: int, width: int) -> None:
    for draw in (words, uniform, normal):
        row = draw(KEY, torch.tensor([start]), width)[0]
        assert torch.equal(row, torch.stack([one(draw, start + offset) for offset in range(width)]))


def test_rows_of_a_matrix_are_slices_of_its_flattening() -> None:
    whole = normal(KEY, torch.tensor([0]), 9 * 13)[0].view(9, 13)
    starts = torch.arange(2, 7) * 13 + 5
    assert torch.equal(normal(KEY, starts, 6), whole[2:7, 5:11])


def test_streams_and_keys_differ() -> None:
    start = torch.tensor([0, 0, 0])
    rows = words(KEY, start, 64, torch.tensor([0, 1, -1]))
    assert torch.equal(rows[:1], words(KEY, start[:1], 64))
    assert len({tuple(row) for row in rows.tolist()}) == 3
    assert not torch.equal(words(derive_key(8, "layers.0.mlp.up.weight"), start[:1], 64), rows[:1])
    assert derive_key(1, 23) != derive_key(12, 3)


def test_high_words_of_the_counter_are_used() -> None:
    low, high = words(KEY, torch.tensor([5]), 8), words(KEY, torch.tensor([5 + 4 * 2**32]), 8)
    assert not torch.equal(low, high)


def test_uniform_is_uniform() -> None:
    sample = uniform(KEY, torch.tensor([3]), 200_000)[0]
    assert 0.0 < sample.min() < 1e-4 and 1 - 1e-4 < sample.max() < 1.0
    sorted_sample = sample.sort().values
    steps = torch.arange(1, len(sample) + 1, dtype=torch.float64) / len(sample)
    assert (sorted_sample - steps).abs().max() < 1.95 / math.sqrt(len(sample))  # Kolmogorov, 0.1 %


def test_normal_is_normal() -> None:
    sample = normal(KEY, torch.tensor([0]), 200_000)[0]
    sorted_sample = sample.sort().values
    steps = torch.arange(1, len(sample) + 1, dtype=torch.float64) / len(sample)
    assert (torch.special.ndtr(sorted_sample) - steps).abs().max() < 1.95 / math.sqrt(len(sample))
    pairs = sample.view(-1, 2)
    assert abs(float((pairs[:, 0] * pairs[:, 1]).mean())) < 0.01  # the two branches are independent
    assert torch.isfinite(sample).all()


def test_works_on_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert normal(KEY, torch.arange(5), 7).shape == (5, 7)
