"""Boxes of a tensor: axis-aligned, given by where they start and how far they reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import product

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""``(offsets, sizes)``, one number per dimension."""


def boxes_of_flat_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements ``start`` to ``stop`` of a row-major tensor of ``shape`` are made of.

    Each box is itself contiguous in the flattened tensor, and they come in the order of its elements; there are at
    most ``2 * len(shape) - 1``. A shard of a flattened matrix, for example, is the end of a row, whole
    rows, and the beginning of a row.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range {start}..{stop} is not inside a tensor of shape {shape}")
    if start == stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if stop > last * row:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of_flat_range(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes)


def intersection(first: Box, second: Box) -> Box | None:
    """The box that two boxes share, or None."""
    offsets = tuple(map(max, first[0], second[0]))
    ends = tuple(min(a + m, b + n) for a, m, b, n in zip(first[0], first[1], second[0], second[1], strict=True))
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def inside(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Index of ``box`` in an array whose first element stands at ``origin``."""
    return tuple(slice(o - b, o - b + n) for o, n, b in zip(box[0], box[1], origin, strict=True))


def chunks(box: Box, elements: int) -> Iterator[Box]:
    """``box`` cut along its slowest dimensions into boxes of at most ``elements`` elements."""
    offsets, sizes = box
    if math.prod(sizes) <= elements or not sizes:
        yield box
        return
    row = math.prod(sizes[1:])
    step = max(1, elements // row) if row else sizes[0]
    for start in range(0, sizes[0], step):
        count = min(step, sizes[0] - start)
        part: Box = ((offsets[0] + start, *offsets[1:]), (count, *sizes[1:]))
        if count == 1 and row > elements:
            for inner_offsets, inner_sizes in chunks((offsets[1:], sizes[1:]), elements):
                yield (part[0][0], *inner_offsets), (1, *inner_sizes)
        else:
            yield part


def cover_problem(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Why ``boxes`` do not cover a tensor of ``shape``, each element exactly once; None if they do.

    Linear in the number of boxes, and exact: how often an element is covered is a function on the
    grid, and such a function is determined by its mixed differences, which for one box are its corners
    with alternating signs. So the corners of all boxes must sum up to the corners of the whole.
    """
    corners: dict[tuple[int, ...], int] = {}
    elements = 0
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or any(
            o < 0 or n < 0 or o + n > extent for o, n, extent in zip(offsets, sizes, shape, strict=True)
        ):
            return f"a slice at {list(offsets)} of {list(sizes)} is not inside shape {list(shape)}"
        elements += math.prod(sizes)
        _add_corners(corners, offsets, sizes, 1)
    _add_corners(corners, tuple(0 for _ in shape), shape, -1)
    wrong = sorted(place for place, count in corners.items() if count)
    if not wrong:
        return None
    total = math.prod(shape)
    kind = "is missing" if elements < total else "is there more than once" if elements > total else "is misplaced"
    return f"part of it {kind} ({elements} elements of {total}, first at {list(wrong[0])})"


def _add_corners(
    corners: dict[tuple[int, ...], int], offsets: tuple[int, ...], sizes: tuple[int, ...], weight: int
) -> None:
    for ends in product((0, 1), repeat=len(sizes)):
        place = tuple(offset + size * end for offset, size, end in zip(offsets, sizes, ends, strict=True))
        corners[place] = corners.get(place, 0) + weight * (-1) ** sum(ends)
