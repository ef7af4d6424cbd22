"""The mesh: which ranks talk to which, by axis.

    rank grid   [pp, replicate, shard, tp]        row-major; ``Layout.placement`` says who stands where
    dp          replicate x shard                 the ranks that hold different data
    world       all of them                       the default process group
    embedding   first and last pipeline rank      the two copies of a tied embedding in one column
    intra       dp ranks of one node              these two only after ``divide_by_node``; see ``job.nodes``
    inter       one dp rank of each node

Every axis has its own process group (so traffic can be told apart by axis), also where two axes join
the same ranks. Inside a group, ranks stand in the order of their coordinate, whatever the placement.
Axes of degree 1 share a group of this rank alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.collectives import all_gather_json
from meshwright.comm.position import name_group
from meshwright.comm.shared_memory import channel_of, close_channel, open_channel
from meshwright.errors import InputError
from meshwright.job.grid import GRID_AXES, Coordinates, coordinates, grid_shape
from meshwright.job.layout import V_SCHEDULES, Layout
from meshwright.job.nodes import NODE_AXES, node_groups

_DP_SPAN = (1, 2)


class Mesh:
    """The ranks of one layout on a started ``torch.distributed``, as a :class:`DeviceMesh` and named groups.

    Every rank of the default process group must build it at the same moment (groups are made
    collectively), outside ``FakeTensorMode``. On the ``fake`` backend only this rank's groups are
    made, so 16,384 ranks take milliseconds.

    Args:
        layout: the degrees and the placement; ``layout.ranks`` must equal the world size.
        device_type: ``"cpu"`` or ``"cuda"``.
        world_group: the group that ``group("world")`` answers with; absent: the default group.
        timeout: after which an operation of its groups gives up; absent: torch's own. A new group does not inherit that
            of the default group.

    Raises:
        InputError: the world has another number of ranks than the layout, or the placement is not
            an order of all ranks.
    """

    def __init__(
        self,
        layout: Layout,
        device_type: str = "cpu",
        world_group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        size = dist.get_world_size()
        if layout.ranks != size:
            raise InputError(
                f"layout: {layout} takes {layout.ranks} ranks but {size} are running; "
                f"start {layout.ranks} ranks or choose degrees whose product is {size}"
            )
        order = list(layout.placement) if layout.placement is not None else list(range(size))
        if sorted(order) != list(range(size)):
            raise InputError(f"placement: must list each of the ranks 0 to {size - 1} once, got {order[:16]}")
        self.layout = layout
        self.device_type = device_type
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.place: Coordinates = coordinates(layout, self.rank)
        self._world = dist.group.WORLD if world_group is None else world_group
        self._grid = torch.tensor(order, dtype=torch.int).view(grid_shape(layout))
        self._owned: list[dist.ProcessGroup] = []
        self._shared: list[dist.ProcessGroup] = []
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._alone: dist.ProcessGroup | None = None
        self._coordinates: dict[str, int] = {}
        self._axis_of_name: dict[str, str] = {}
        self._make_groups()
        self._announce(self.axes)
        self._root = DeviceMesh.from_group(
            [self._groups[axis] for axis in GRID_AXES], device_type, mesh=self._grid, mesh_dim_names=GRID_AXES
        )
        self._dp = DeviceMesh.from_group(self._groups["dp"], device_type, mesh_dim_names=("dp",))

    def _make_groups(self) -> None:
        for position, axis in enumerate(GRID_AXES):
            self._add(axis, self._grid.movedim(position, -1).reshape(-1, self._grid.shape[position]))
        dp_degree = math.prod(self._grid.shape[position] for position in _DP_SPAN)
        self._add("dp", self._grid.movedim(_DP_SPAN, (-2, -1)).reshape(-1, dp_degree))
        assert self._world is not None
        self._groups["world"] = self._world
        self._ranks["world"] = tuple(range(self.layout.ranks))
        if self.layout.pp > 1 and self.layout.schedule not in V_SCHEDULES:
            self._add("embedding", self._grid[[0, -1]].movedim(0, -1).reshape(-1, 2))

    def _add(self, axis: str, members: torch.Tensor) -> None:
        """Make the groups whose global ranks are the rows of ``members`` [groups, degree]; keep mine."""
        if members.shape[1] == 1:
            if self._alone is None:
                # Only this rank is in it, so nobody else needs to know of it.
                self._alone = dist.new_group(
                    [self.rank], timeout=self.timeout, use_local_synchronization=True,
                    group_desc=f"meshwright {self.rank} alone",
                )  # fmt: skip
                self._owned.append(self._alone)
            self._groups[axis], self._ranks[axis] = self._alone, (self.rank,)
            return
        if dist.get_backend(self._world) == "fake":
            members = members[(members == self.rank).any(dim=1)]
        for row in members.tolist():
            group = dist.new_group(row, timeout=self.timeout, group_desc=f"meshwright {axis}", sort_ranks=False)
            if self.rank in row:
                self._groups[axis], self._ranks[axis] = group, tuple(row)
                self._owned.append(group)

    def divide_by_node(self, node_size: int) -> None:
        """Make the groups ``intra`` and ``inter`` of ``job.nodes``; where they are made already, nothing happens.

        Every rank of the default process group must call it at the same moment.

        Args:
            node_size: ranks of a node; every node must have as many dp ranks, and more than one.
        """
        if "intra" in self._groups:
            return
        # Ranks have numbers also where the model's tensors have none.
        with unset_fake_temporarily():
            for axis in NODE_AXES:
                self._add(axis, torch.tensor(node_groups(self.layout, node_size, axis)))
            self._announce(NODE_AXES)

    def _announce(self, axes: Sequence[str]) -> None:
        """Let everybody know of the groups of ``axes``, which were just made."""
        for axis in axes:
            group, ranks = self._groups[axis], self._ranks[axis]
            self._coordinates[axis] = ranks.index(self.rank)
            if len(ranks) > 1:
                name_group(str(group.group_name), axis, ranks)
            if group is not self._alone:
                self._axis_of_name[str(group.group_name)] = axis
        self._share_memory(axes)

    def _share_memory(self, axes: Sequence[str]) -> None:
        """Let the CPU ranks of each group that are all on one host exchange through memory."""
        if self.device_type != "cpu" or dist.get_backend(self._world) == "fake":
            return
        for group in dict.fromkeys(self._groups[axis] for axis in axes if self.degree(axis) > 1):
            if channel_of(group) is None:
                open_channel(group, all_gather_json, self.timeout)
                self._shared.append(group)

    def coordinate(self, axis: str) -> int:
        """This rank's index along ``axis``: its rank inside ``group(axis)``."""
        self.group(axis)
        return self._coordinates[axis]

    def degree(self, axis: str) -> int:
        """How many ranks ``group(axis)`` has."""
        return len(self.ranks(axis))

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along ``axis``.

        Raises:
            InputError: there is no such axis, or this rank is in no group of it.
        """
        if axis not in self._groups:
            raise InputError(f"axis: rank {self.rank} has no group {axis!r}; use one of {', '.join(self._groups)}")
        return self._groups[axis]

    def ranks(self, axis: str) -> tuple[int, ...]:
        """The global ranks of ``group(axis)``, in group order."""
        self.group(axis)
        return self._ranks[axis]

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis this rank has a group of."""
        return tuple(self._groups)

    @property
    def embedding_group(self) -> dist.ProcessGroup | None:
        """The pair of ranks that hold the two copies of a tied embedding in this column.

        None on ranks between them, without a pipeline, and for V schedules (whose first and last
        stage share a rank).
        """
        return self._groups.get("embedding")

    def axis_of(self, group: dist.ProcessGroup | str) -> str:
        """The axis a group (or a group name) belongs to; ``"alone"`` for degree 1, ``"other"`` if it is not ours."""
        name = group if isinstance(group, str) else str(group.group_name)
        if self._alone is not None and name == self._alone.group_name:
            return "alone"
        return self._axis_of_name.get(name, "other")

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """The torch mesh of the named grid axes, in grid order, or of ``"dp"`` alone; without names: all of them."""
        if axes == ("dp",):
            return self._dp
        # Ranks have numbers also where the model's tensors have none.
        with unset_fake_temporarily():
            return self._root[axes if len(axes) > 1 else axes[0]] if axes else self._root

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    def close(self) -> None:
        """Destroy the groups this mesh made; the default group stays. Calling it again does nothing."""
        for group in self._shared:
            close_channel(group)
        self._shared = []
        owned, self._owned = self._owned, []
        for group in reversed(owned):
            dist.destroy_process_group(group)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
