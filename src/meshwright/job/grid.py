"""Which rank stands where: the grid ``[pp, replicate, shard, tp]`` and the groups along its axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from meshwright.errors import InputError
from meshwright.job.layout import Layout

GRID_AXES: tuple[str, ...] = ("pp", "replicate", "shard", "tp")
"""The axes of the rank grid, slowest first (row-major)."""
AXES: tuple[str, ...] = (*GRID_AXES, "dp", "world")
"""Every axis that forms groups; ``dp`` is ``replicate`` x ``shard``, ``world`` is all of them."""

_SPANS: dict[str, tuple[int, ...]] = {
    "pp": (0,),
    "replicate": (1,),
    "shard": (2,),
    "tp": (3,),
    "dp": (1, 2),
    "world": (0, 1, 2, 3),
}


class Coordinates(NamedTuple):
    """Where one rank stands in the grid."""

    pp: int
    replicate: int
    shard: int
    tp: int


def grid_shape(layout: Layout) -> tuple[int, int, int, int]:
    """Extents of the grid axes ``[pp, replicate, shard, tp]``."""
    return (layout.pp, layout.replicas, layout.shard_degree, layout.tp)


def _span(axis: str) -> tuple[int, ...]:
    if axis not in _SPANS:
        raise InputError(f"axis: {axis!r} is not an axis of the rank grid; use one of {', '.join(AXES)}")
    return _SPANS[axis]


def _rank_at(layout: Layout, position: int) -> int:
    return position if layout.placement is None else layout.placement[position]


def _position(shape: tuple[int, ...], place: tuple[int, ...]) -> int:
    position = 0
    for extent, index in zip(shape, place, strict=True):
        position = position * extent + index
    return position


def rank_of(layout: Layout, place: tuple[int, int, int, int]) -> int:
    """The global rank at the grid position ``place`` = (pp, replicate, shard, tp)."""
    return _rank_at(layout, _position(grid_shape(layout), tuple(place)))


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """The grid position of one global rank: the inverse of :func:`rank_of`.

    Raises:
        InputError: the layout has no such rank.
    """
    shape = grid_shape(layout)
    total = math.prod(shape)
    if not 0 <= rank < total:
        raise InputError(f"rank: {rank} is not a rank of layout {layout}; use 0 to {total - 1}")
    position = rank if layout.placement is None else layout.placement.index(rank)
    place = []
    for extent in reversed(shape):
        position, index = divmod(position, extent)
        place.append(index)
    pp, replicate, shard, tp = reversed(place)
    return Coordinates(pp, replicate, shard, tp)


def groups_of(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    """The groups of global ranks that communicate along ``axis``; each rank is in exactly one.

    Inside a group, ranks are in the order of their coordinate along the axis; groups are in the
    row-major order of the remaining coordinates.
    """
    span = _span(axis)
    shape = grid_shape(layout)
    kept = [position for position in range(len(shape)) if position not in span]

    def members(fixed: tuple[int, ...]) -> Iterator[int]:
        for moving in product(*(range(shape[position]) for position in span)):
            place = [0] * len(shape)
            for position, index in zip((*kept, *span), (*fixed, *moving), strict=True):
                place[position] = index
            yield _rank_at(layout, _position(shape, tuple(place)))

    return [tuple(members(fixed)) for fixed in product(*(range(shape[position]) for position in kept))]
