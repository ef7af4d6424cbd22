"""The mesh against the pure rank grid: groups, coordinates, placement; and at 16,384 ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.comm.shared_memory import channel_of
from meshwright.errors import InputError
from meshwright.job.grid import AXES, coordinates, groups_of
from meshwright.job.layout import Layout
from meshwright.prove.pool import RankPool

LAYOUTS = (
    Layout(dp=4, zero=1),
    Layout(dp=4, shard=2, zero=3),
    Layout(tp=4),
    Layout(pp=4),
    Layout(dp=2, tp=2, placement=(3, 1, 0, 2)),
    Layout(pp=2, tp=2, placement=(2, 0, 3, 1)),
    Layout(dp=2, pp=2, schedule="zbv"),
)


def describe(layout: Layout) -> dict[str, tuple[int, ...]]:
    """The groups this rank is in, after a sum of ranks over each proved them alive; checks what needs torch."""
    with Mesh(layout) as mesh:
        rank = dist.get_rank()
        place = coordinates(layout, rank)
        found = {}
        for axis in mesh.axes:
            group = mesh.group(axis)
            total = torch.tensor([float(rank)])
            all_reduce(total, group)
            assert total.item() == sum(mesh.ranks(axis))
            assert mesh.degree(axis) == group.size()
            # Order inside the group is the coordinate, placement or not.
            assert mesh.coordinate(axis) == group.rank() == mesh.ranks(axis).index(rank)
            assert tuple(dist.get_process_group_ranks(group)) == mesh.ranks(axis)
            assert mesh.axis_of(group) == (axis if mesh.degree(axis) > 1 or axis == "world" else "alone")
            found[axis] = mesh.ranks(axis)
        assert mesh.device_mesh().get_coordinate() == tuple(place)
        pair = mesh.device_mesh("replicate", "shard")
        assert pair.get_group("shard") is mesh.group("shard")
        assert pair.get_local_rank("replicate") == place.replicate
        assert mesh.device_mesh("dp").get_group() is mesh.group("dp")
        assert mesh.device_mesh("tp").size() == layout.tp
    mesh.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_are_those_of_the_pure_grid(ranks, layout):
    found = ranks(4).run(describe, layout)
    for rank, groups in enumerate(found):
        for axis in AXES:
            (mine,) = [group for group in groups_of(layout, axis) if rank in group]
            assert groups[axis] == (tuple(sorted(mine)) if axis == "world" else mine)


def test_embedding_group_joins_first_and_last_stage(ranks):
    found = ranks(4).run(describe, Layout(pp=4))
    assert [groups.get("embedding") for groups in found] == [(0, 3), None, None, (0, 3)]
    found = ranks(4).run(describe, Layout(pp=2, tp=2))
    assert [groups.get("embedding") for groups in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    for layout in (Layout(dp=4), Layout(dp=2, pp=2, schedule="dualpipev")):
        assert all("embedding" not in groups for groups in ranks(4).run(describe, layout))


def group_count_after() -> tuple[int, int]:
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        describe(Layout(dp=2, tp=2))
    return before, len(dist.distributed_c10d._world.pg_map)


def test_close_leaves_no_group_behind(ranks):
    for before, after in ranks(4).run(group_count_after):
        assert before == after


def refusals() -> list[str]:
    messages = []
    for layout in (Layout(dp=3), Layout(dp=2, placement=(0, 0))):
        with pytest.raises(InputError) as refusal:
            Mesh(layout)
        messages.append(str(refusal.value))
    with Mesh(Layout(dp=2)) as mesh, pytest.raises(InputError) as refusal:
        mesh.group("ep")
    return [*messages, str(refusal.value)]


def test_refusals_say_value_and_rule(ranks):
    for wrong_size, wrong_order, wrong_axis in ranks(2).run(refusals):
        assert wrong_size.startswith("layout: dp=3 takes 3 ranks but 2 are running")
        assert wrong_order == "placement: must list each of the ranks 0 to 1 once, got [0, 0]"
        assert "has no group 'ep'; use one of pp, replicate, shard, tp, dp, world" in wrong_axis


LARGE = """
import sys, time
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from meshwright.comm.mesh import Mesh
from meshwright.job.grid import groups_of
from meshwright.job.layout import Layout
rank = int(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16384)
layout = Layout(dp=128, shard=32, zero=3, tp=8, pp=16, placement=tuple(reversed(range(16384))))
began = time.perf_counter()
mesh = Mesh(layout)
print(time.perf_counter() - began)
for axis in ("pp", "replicate", "shard", "tp", "dp"):
    assert mesh.ranks(axis) in groups_of(layout, axis), axis
    assert rank in mesh.ranks(axis)
ends = mesh.embedding_group
assert (ends is not None) == (mesh.coordinate("pp") in (0, 15))
mesh.close()
"""


@pytest.mark.parametrize("rank", [0, 9731])
def test_sixteen_thousand_fake_ranks_take_no_time(rank):
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", LARGE, str(rank)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0, f"built in {done.stdout} s, whole process {time.perf_counter() - began:.1f} s"


def patience(seconds: float) -> list[float]:
    """How long each group of a mesh waits, and the memory it shares."""
    found = []
    with Mesh(Layout(dp=2), timeout=timedelta(seconds=seconds)) as mesh:
        for axis in set(mesh.axes) - {"world"}:
            group = mesh.group(axis)
            found.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
            if (channel := channel_of(group)) is not None:
                found.append(channel._timeout)
    return found


def test_every_group_waits_as_long_as_it_is_told(ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(2).run(patience, 7.0):
        assert len(found) > 4 and set(found) == {7.0}
