"""Which dp ranks share a node, with tensor and pipeline ranks beside them, and in any placement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.job.layout import Layout
from meshwright.job.nodes import node_degree, node_groups
from meshwright.prove.pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("layout", "size", "degree"),
    [
        (Layout(dp=4), 1, 1),
        (Layout(dp=4), 2, 2),
        (Layout(dp=4), 3, None),
        (Layout(dp=4), 8, 4),
        (Layout(dp=4, tp=2), 2, 1),
        (Layout(dp=4, tp=2), 4, 2),
        (Layout(dp=4, tp=2), 3, None),
        (Layout(dp=4, pp=2), 2, 2),
        (Layout(dp=3, pp=2), 2, None),
        (Layout(dp=6), 2, 2),
        (Layout(dp=4, placement=(0, 2, 1, 3)), 2, 2),
        (Layout(dp=4, pp=2, placement=(0, 4, 1, 5, 2, 6, 3, 7)), 4, 2),
        (Layout(dp=4, pp=2, placement=(0, 1, 2, 4, 3, 5, 6, 7)), 4, None),
    ],
)
def test_dp_ranks_of_a_node(layout: Layout, size: int, degree: int | None) -> None:
    assert node_degree(layout, size) == degree


def test_groups_by_hand() -> None:
    layout = Layout(dp=4, tp=2)
    assert node_groups(layout, 4, "intra") == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert node_groups(layout, 4, "inter") == [(0, 4), (2, 6), (1, 5), (3, 7)]
    crossed = Layout(dp=4, placement=(0, 2, 1, 3))  # dp 0, 2 are ranks 0, 1
    assert node_groups(crossed, 2, "intra") == [(0, 1), (2, 3)]
    assert node_groups(crossed, 2, "inter") == [(0, 2), (1, 3)]


def divided(layout: Layout, size: int) -> dict[str, tuple[int, ...]]:
    """The two groups of this rank, after a sum over each proved them alive."""
    with Mesh(layout) as mesh:
        mesh.divide_by_node(size)
        mesh.divide_by_node(size)  # nothing more
        found = {}
        for axis in ("intra", "inter"):
            group, total = mesh.group(axis), torch.tensor([float(dist.get_rank())])
            all_reduce(total, group)
            assert total.item() == sum(mesh.ranks(axis))
            assert mesh.axis_of(group) == axis
            assert mesh.coordinate(axis) == group.rank() == mesh.ranks(axis).index(dist.get_rank())
            found[axis] = mesh.ranks(axis)
        return found


def test_the_mesh_has_them(ranks: Ranks) -> None:
    for layout in (Layout(dp=4), Layout(dp=4, placement=(0, 2, 1, 3))):
        for rank, found in enumerate(ranks(4).run(divided, layout, 2)):
            for axis, members in found.items():
                assert members in node_groups(layout, 2, axis) and rank in members
