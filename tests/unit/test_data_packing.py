"""Samples out of documents: nothing lost, nothing twice, no target across documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.packing import IGNORE, PADDING, Packing, best_fit_decreasing, pack
from meshwright.data.samples import Samples
from meshwright.data.split import Spans, split, validation_documents
from meshwright.data.tokens import TokenStore
from meshwright.errors import DataError, InputError

END = 0
DOCUMENT_LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12).filter(lambda sizes: max(sizes) > 1)


def store_of(lengths: list[int], counted: np.ndarray | None = None) -> TokenStore:
    """Documents of distinct tokens 1, 2, ... whose last token is the end token."""
    ends = np.cumsum(lengths)
    tokens = np.arange(1, ends[-1] + 1, dtype=np.uint32)
    tokens[ends - 1] = END
    spans = np.stack([ends - lengths, ends], axis=1).astype(np.int64)
    return TokenStore(tokens, spans, counted, size=int(ends[-1]) + 1, end=END, origin="test")


def samples_of(lengths: list[int], length: int, packing: Packing, document_mask: bool = True) -> Samples:
    store = store_of(lengths)
    return Samples(store, store.spans, length, packing, document_mask)


def test_stream_is_the_figure_in_the_module() -> None:
    rows = samples_of([5, 3], 4, "stream").rows(np.arange(2))
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [END, 6, 7, END]]
    assert rows.labels.tolist() == [[2, 3, 4, END], [IGNORE, 7, END, IGNORE]]
    assert rows.positions.tolist() == [[0, 1, 2, 3], [0, 0, 1, 2]]
    assert rows.documents.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1]]


def test_best_fit_is_the_figure_in_the_module() -> None:
    samples = samples_of([5, 3], 4, "best-fit")
    rows = samples.rows(np.arange(2))
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [6, 7, 0, 0]]
    assert rows.labels.tolist() == [[2, 3, 4, END], [7, END, IGNORE, IGNORE]]
    assert rows.documents.tolist() == [[0, 0, 0, 0], [0, 0, PADDING, PADDING]]
    assert rows.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert not samples.masked


def test_without_document_mask_positions_run_through_and_targets_still_stay_inside() -> None:
    samples = samples_of([5, 3], 8, "stream", document_mask=False)
    rows = samples.rows(np.array([0]))
    assert not samples.masked
    assert rows.positions.tolist() == [list(range(8))]
    assert rows.labels[0, 4] == IGNORE


@settings(deadline=None)
@given(lengths=DOCUMENT_LENGTHS, length=st.integers(1, 17), packing=st.sampled_from(["stream", "best-fit"]))
def test_each_token_but_a_documents_first_is_a_target_exactly_once(
    lengths: list[int], length: int, packing: Packing
) -> None:
    samples = samples_of(lengths, length, packing)
    store = samples.store
    rows = samples.rows(np.arange(len(samples)))
    counted = rows.labels != IGNORE
    wanted = [store.tokens[begin + 1 : end] for begin, end in store.spans.tolist()]
    assert sorted(rows.labels[counted].tolist()) == sorted(np.concatenate(wanted).tolist())
    assert samples.targets().tolist() == np.concatenate(wanted).tolist()
    # tokens are numbered: the target of token i is i + 1, or the end token that stands there
    following = np.append(np.asarray(store.tokens[0 : len(store.tokens)]), 0)[rows.tokens[counted]]
    assert (rows.labels[counted] == following).all()
    assert (rows.tokens[counted] != END).all()  # the end token has no target
    assert counted.any(axis=1).all()  # no sample without a target


@settings(deadline=None)
@given(lengths=DOCUMENT_LENGTHS, length=st.integers(1, 17), packing=st.sampled_from(["stream", "best-fit"]))
def test_positions_restart_with_documents_and_padding_is_marked(
    lengths: list[int], length: int, packing: Packing
) -> None:
    samples = samples_of(lengths, length, packing)
    rows = samples.rows(np.arange(len(samples)))
    for positions, documents in zip(rows.positions, rows.documents, strict=True):
        for number in set(documents.tolist()):
            where = np.flatnonzero(documents == number)
            assert (np.diff(where) == 1).all()
            assert positions[where].tolist() == list(range(len(where)))
    assert samples.masked == any(len(set(row.tolist()) - {PADDING}) > 1 for row in rows.documents)


def test_best_fit_keeps_whole_every_document_that_fits() -> None:
    lengths = [9, 4, 4, 3, 30, 2, 8, 5]
    samples = samples_of(lengths, 10, "best-fit")
    pieces = samples.pieces
    for begin, end in samples.spans.tolist():
        inside = pieces.size[(pieces.begin >= begin) & (pieces.begin < end)]
        assert len(inside) == -(-(end - begin - 1) // 10)


def test_a_prompt_is_seen_but_not_counted() -> None:
    counted = np.array([0, 0, 0, 1, 1, 1, 1, 1], np.uint8)
    store = store_of([6, 2], counted)
    rows = Samples(store, store.spans, 8, "stream").rows(np.array([0]))
    assert rows.tokens.tolist() == [[1, 2, 3, 4, 5, END, 7, END]]
    assert rows.labels.tolist() == [[IGNORE, IGNORE, 4, 5, END, IGNORE, END, IGNORE]]
    assert Samples(store, store.spans, 8).targets().tolist() == [4, 5, END, END]


def optimum(sizes: list[int], capacity: int) -> int:
    """Fewest bins, by trying everything."""
    best = len(sizes)

    def place(index: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(sizes):
            best = len(rooms)
            return
        for number in range(len(rooms)):
            if rooms[number] >= sizes[index] and rooms[number] not in rooms[:number]:
                place(index + 1, [*rooms[:number], rooms[number] - sizes[index], *rooms[number + 1 :]])
        place(index + 1, [*rooms, capacity - sizes[index]])

    sizes = sorted(sizes, reverse=True)
    place(0, [])
    return best


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_best_fit_decreasing_is_within_its_bound(sizes: list[int]) -> None:
    bins = best_fit_decreasing(sizes, 20)
    loads = np.bincount(bins, weights=sizes)
    assert loads.max() <= 20 and loads.min() >= 1
    assert -(-sum(sizes) // 20) <= len(loads) <= 11 / 9 * optimum(sizes, 20) + 1


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 64), min_size=1, max_size=200), capacity=st.integers(64, 70))
def test_best_fit_decreasing_equals_the_plain_search(sizes: list[int], capacity: int) -> None:
    free: list[int] = []
    expected = np.empty(len(sizes), np.int64)
    since: dict[int, int] = {}  # when a bin got its present room, for ties
    for clock, item in enumerate(np.argsort(-np.array(sizes), kind="stable").tolist()):
        fitting = [number for number, room in enumerate(free) if room >= sizes[item]]
        if fitting:
            chosen = min(fitting, key=lambda number: (free[number], since[number]))
        else:
            chosen = len(free)
            free.append(capacity)
        free[chosen] -= sizes[item]
        since[chosen] = clock
        expected[item] = chosen
    assert best_fit_decreasing(sizes, capacity).tolist() == expected.tolist()


@settings(deadline=None)
@given(lengths=DOCUMENT_LENGTHS, fraction=st.floats(0.01, 0.99))
def test_the_split_is_exact_and_shares_no_token(lengths: list[int], fraction: float) -> None:
    store = store_of(lengths)
    try:
        training, validation = split(store.spans, fraction)
    except InputError:
        return  # one part would have nothing to predict

    def tokens(spans: Spans) -> set[int]:
        return {index for begin, end in spans.tolist() for index in range(begin, end)}

    assert not tokens(training) & tokens(validation)
    assert tokens(training) | tokens(validation) == set(range(sum(lengths)))
    if len(lengths) > 1:
        assert len(validation) == min(max(1, round(len(lengths) * fraction)), len(lengths))


def test_no_training_row_touches_the_validation_tokens() -> None:
    store = store_of([100])
    training, validation = split(store.spans, 0.25)
    seen = Samples(store, training, 8).rows(np.arange(len(Samples(store, training, 8))))
    held = Samples(store, validation, 8).rows(np.arange(len(Samples(store, validation, 8))))
    trained = set(seen.tokens.flatten().tolist()) | set(seen.labels[seen.labels != IGNORE].tolist())
    assert trained - {END} == set(range(1, 76))
    assert set(held.labels[held.labels != IGNORE].tolist()) == {*range(77, 100), END}


def test_held_out_documents_are_spread_evenly() -> None:
    assert validation_documents(100, 0.05).tolist() == [10, 30, 50, 70, 90]
    assert validation_documents(3, 0.001).tolist() == [1]


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(DataError, match="nothing to predict"):
        pack(np.array([[0, 1], [1, 2]], np.int64), 4, "stream")
    with pytest.raises(InputError, match="sequence_length=0 is not positive"):
        pack(np.array([[0, 9]], np.int64), 0, "stream")
    with pytest.raises(InputError, match=r"validation=1\.5 is no fraction"):
        split(np.array([[0, 9]], np.int64), 1.5)
