"""The rank grid: who stands where, and which ranks form each group."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.job.grid import AXES, coordinates, groups_of, rank_of
from meshwright.job.layout import Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shard, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    layout = Layout(pp=draw(st.integers(1, 3)), tp=draw(st.integers(1, 3)), dp=shard * replicas, shard=shard)
    if draw(st.booleans()):
        layout = layout.model_copy(update={"placement": tuple(draw(st.permutations(range(layout.ranks))))})
    return layout


def test_groups_of_two_by_two_by_two() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    assert groups_of(layout, "tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups_of(layout, "dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups_of(layout, "shard") == groups_of(layout, "dp")
    assert groups_of(layout, "replicate") == [(rank,) for rank in range(8)]
    assert groups_of(layout, "pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups_of(layout, "world") == [tuple(range(8))]


def test_hsdp_puts_the_shards_next_to_each_other() -> None:
    layout = Layout(dp=4, shard=2, zero=3)
    assert groups_of(layout, "shard") == [(0, 1), (2, 3)]
    assert groups_of(layout, "replicate") == [(0, 2), (1, 3)]
    assert groups_of(layout, "dp") == [(0, 1, 2, 3)]


def test_placement_moves_ranks_not_groups() -> None:
    layout = Layout(dp=2, tp=2, placement=(3, 1, 0, 2))
    assert groups_of(layout, "tp") == [(3, 1), (0, 2)]
    assert groups_of(layout, "dp") == [(3, 0), (1, 2)]
    assert coordinates(layout, 3) == (0, 0, 0, 0)
    assert coordinates(layout, 2) == (0, 0, 1, 1)


@given(layouts())
def test_coordinates_and_groups_agree(layout: Layout) -> None:
    names = ("pp", "replicate", "shard", "tp")
    degrees = {
        "pp": layout.pp, "replicate": layout.replicas, "shard": layout.shard_degree, "tp": layout.tp, "dp": layout.dp,
        "world": layout.ranks,
    }  # fmt: skip
    for rank in range(layout.ranks):
        assert rank_of(layout, coordinates(layout, rank)) == rank
    for axis in AXES:
        groups = groups_of(layout, axis)
        assert sorted(itertools.chain(*groups)) == list(range(layout.ranks))
        for group in groups:
            assert len(group) == degrees[axis]
            places = [coordinates(layout, rank) for rank in group]
            if axis in names:
                column = names.index(axis)
                assert [place[column] for place in places] == list(range(len(group)))
                assert len({place[:column] + place[column + 1 :] for place in places}) == 1


def test_unknown_axis_and_rank_are_refused() -> None:
    with pytest.raises(InputError, match="axis: 'data' is not an axis of the rank grid; use one of pp, replicate"):
        groups_of(Layout(), "data")
    with pytest.raises(InputError, match="rank: 4 is not a rank of layout dp=2 tp=2; use 0 to 3"):
        coordinates(Layout(dp=2, tp=2), 4)
