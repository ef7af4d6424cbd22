"""The order of samples and the batches cut from it: one cursor, whatever the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.batch import Batch, micro_batches
from meshwright.data.order import Order, permutation
from meshwright.data.packing import IGNORE, PADDING
from meshwright.data.samples import Samples
from meshwright.data.tokens import TokenStore
from meshwright.errors import InputError
from meshwright.job.schedule_rules import micro_steps


def numbered(count: int, length: int = 4) -> Samples:
    """``count`` samples of one document each; sample s is made of the token s + 1."""
    tokens = np.repeat(np.arange(1, count + 1, dtype=np.uint32), length)
    begins = np.arange(count, dtype=np.int64) * length
    spans = np.stack([begins, begins + length], axis=1)
    return Samples(TokenStore(tokens, spans, None, count + 1, None, "test"), spans, length)


def global_batch(samples: Samples, indices: np.ndarray, size: int, micro: int, dp: int) -> list[list[Batch]]:
    return [micro_batches(samples, indices, size, micro, rank, dp) for rank in range(dp)]


def samples_seen(batches: list[list[Batch]]) -> list[int]:
    """Sample numbers of one step over all ranks, in the order of the global batch."""
    by_example = {
        int(example): int(row[0]) - 1
        for rank in batches
        for batch in rank
        for example, row in zip(batch.examples, batch.tokens, strict=True)
        if example >= 0
    }
    return [by_example[example] for example in sorted(by_example)]


def test_the_order_is_these_numbers_for_ever() -> None:
    assert permutation(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permutation(0, 1, 8).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]
    assert permutation(1, 0, 8).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]


@settings(deadline=None)
@given(seed=st.integers(0, 2**64), epoch=st.integers(0, 1000), count=st.integers(1, 200))
def test_an_epoch_has_each_sample_once(seed: int, epoch: int, count: int) -> None:
    assert sorted(permutation(seed, epoch, count).tolist()) == list(range(count))


@settings(deadline=None)
@given(count=st.integers(1, 30), cursor=st.integers(0, 200), size=st.integers(0, 80))
def test_a_batch_may_span_epochs_and_is_a_function_of_the_cursor(count: int, cursor: int, size: int) -> None:
    taken = Order(count, seed=3).samples(cursor, size).tolist()
    assert taken == [int(permutation(3, g // count, count)[g % count]) for g in range(cursor, cursor + size)]


def test_stopping_in_the_second_epoch_and_resuming_equals_going_on() -> None:
    samples, size = numbered(1000), 8  # 125 steps an epoch
    whole = [Order(1000, 5).samples(step * size, size).tolist() for step in range(250)]
    resumed = Order(1000, 5)  # a new process that knows the cursor alone
    for step in range(200, 250):
        assert resumed.samples(step * size, size).tolist() == whole[step]
    assert whole[200] != whole[75]  # the second epoch is not the first again
    seen = [sample for step in whole[:125] for sample in step]
    assert sorted(seen) == list(range(len(samples)))


@pytest.mark.parametrize("change", [(2, 4), (4, 2), (4, 3), (3, 8), (1, 5)])
def test_another_number_of_ranks_neither_skips_nor_repeats(change: tuple[int, int]) -> None:
    samples, size, order = numbered(60), 10, Order(60, 1)
    seen: list[int] = []
    for step in range(12):
        dp = change[0] if step < 5 else change[1]
        batches = global_batch(samples, order.samples(step * size, size), size, 3, dp)
        seen += samples_seen(batches)
    assert sorted(seen[:60]) == sorted(seen[60:]) == list(range(60))
    assert seen == order.samples(0, 120).tolist()


def padding(batch: Batch) -> Batch:
    """Rows of padding in the shape of ``batch``."""
    return Batch(
        tokens=torch.zeros_like(batch.tokens),
        labels=torch.full_like(batch.labels, IGNORE),
        positions=torch.arange(batch.shape[1]).expand_as(batch.positions),
        documents=None,
        examples=torch.full_like(batch.examples, PADDING),
    )


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 6), st.data())
def test_micro_batch_j_goes_to_rank_j_mod_dp(size: int, micro: int, dp: int, data: st.DataObject) -> None:
    samples = numbered(40)
    count = data.draw(st.integers(0, size))
    indices = Order(40, 2).samples(7, count)
    batches = global_batch(samples, indices, size, micro, dp)
    alone = micro_batches(samples, indices, size, micro, 0, 1)
    assert {len(rank) for rank in batches} == {micro_steps(size, micro, dp)}
    for j in range(micro_steps(size, micro, dp) * dp):
        batch = batches[j % dp][j // dp]
        assert batch.shape == (micro, 4)
        expected = alone[j] if j < len(alone) else padding(batch)
        for name in ("tokens", "labels", "positions", "examples"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))
    assert samples_seen(batches) == indices.tolist()


def test_empty_rows_count_nothing_and_attend_to_themselves() -> None:
    samples = numbered(3)
    (batch,) = micro_batches(samples, np.array([2, 0]), 4, 4, 0, 1)
    assert batch.valid_tokens == 6
    assert batch.examples.tolist() == [0, 1, PADDING, PADDING]
    assert (batch.labels[2:] == IGNORE).all()
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 4
    assert batch.documents is None


def test_documents_are_given_when_a_sample_holds_several() -> None:
    spans = np.array([[0, 3], [3, 6], [6, 14]], np.int64)
    store = TokenStore(np.arange(14, dtype=np.uint32), spans, None, 14, None, "test")
    for samples, given_documents in (
        (Samples(store, spans, 4), True),
        (Samples(store, spans, 4, document_mask=False), False),
    ):
        batches = micro_batches(samples, np.arange(len(samples)), 4, 2, 0, 1)
        assert [batch.documents is not None for batch in batches] == [given_documents] * 2


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="5 samples are more than the global batch of 4"):
        micro_batches(numbered(9), np.arange(5), 4, 2, 0, 1)
    with pytest.raises(InputError, match="must all be at least 1"):
        micro_steps(4, 0, 1)
    with pytest.raises(InputError, match="order of 0 samples is empty"):
        Order(0)
    with pytest.raises(InputError, match="cursor -1 is negative"):
        Order(3).samples(-1, 2)
