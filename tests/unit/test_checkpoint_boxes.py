"""Boxes: flat ranges fall into few boxes, and covering is checked exactly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.checkpoint.boxes import Box, boxes_of_flat_range, chunks, cover_problem, inside, intersection

_SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(_SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    sizes = tuple(draw(st.integers(1, extent - offset)) for extent, offset in zip(shape, offsets, strict=True))
    return offsets, sizes


def _slices(box: Box) -> tuple[slice, ...]:
    return inside(box, tuple(0 for _ in box[0]))


@given(_ranges())
def test_a_flat_range_is_its_boxes_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    elements = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(boxes_of_flat_range(shape, start, stop))
    found = [elements[_slices(box)].reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate([*found, np.zeros(0, int)]), np.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(elements[_slices(box)].shape == box[1] for box in boxes)


def test_a_flat_range_of_a_matrix() -> None:
    assert list(boxes_of_flat_range((4, 5), 3, 17)) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert list(boxes_of_flat_range((4, 5), 6, 8)) == [((1, 1), (1, 2))]
    assert list(boxes_of_flat_range((7,), 2, 7)) == [((2,), (5,))]
    with pytest.raises(ValueError, match=r"range 0\.\.21 is not inside a tensor of shape \(4, 5\)"):
        list(boxes_of_flat_range((4, 5), 0, 21))


@given(st.data(), _SHAPES)
def test_intersection_is_what_both_hold(data: st.DataObject, shape: tuple[int, ...]) -> None:
    first, second = data.draw(_boxes(shape)), data.draw(_boxes(shape))
    masks = [np.zeros(shape, bool) for _ in range(3)]
    masks[0][_slices(first)] = True
    masks[1][_slices(second)] = True
    shared = intersection(first, second)
    if shared is not None:
        masks[2][_slices(shared)] = True
    assert np.array_equal(masks[0] & masks[1], masks[2])


@given(st.data(), _SHAPES, st.integers(1, 20))
def test_chunks_cover_their_box(data: st.DataObject, shape: tuple[int, ...], elements: int) -> None:
    box = data.draw(_boxes(shape))
    parts = list(chunks(box, elements))
    assert all(math.prod(sizes) <= elements for _, sizes in parts)
    moved = [(tuple(o - b for o, b in zip(offsets, box[0], strict=True)), sizes) for offsets, sizes in parts]
    assert cover_problem(box[1], moved) is None


@given(st.data(), _SHAPES)
def test_cover_agrees_with_counting_every_element(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(_boxes(shape), max_size=4))
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[_slices(box)] += 1
    assert (cover_problem(shape, boxes) is None) == bool((counts == 1).all())


@given(st.data(), _SHAPES)
def test_a_tiling_covers_and_without_a_piece_does_not(data: st.DataObject, shape: tuple[int, ...]) -> None:
    total = math.prod(shape)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=5))})
    tiles = [box for a, b in itertools.pairwise(cuts) for box in boxes_of_flat_range(shape, a, b)]
    data.draw(st.randoms()).shuffle(tiles)
    assert cover_problem(shape, tiles) is None
    assert "part of it is missing" in (cover_problem(shape, tiles[1:]) or "")
    assert "is there more than once" in (cover_problem(shape, [*tiles, tiles[0]]) or "")


def test_same_count_in_the_wrong_place_is_found() -> None:
    boxes: list[Box] = [((0, 0), (2, 2)), ((0, 0), (2, 2))]
    assert cover_problem((2, 4), boxes) == "part of it is misplaced (8 elements of 8, first at [0, 0])"
    assert cover_problem((2, 4), [((0, 0), (2, 5))]) == "a slice at [0, 0] of [2, 5] is not inside shape [2, 4]"
