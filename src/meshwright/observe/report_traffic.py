"""Who sends how much to whom: a ledger's sends by axis, spread over the ranks that its groups join."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from meshwright.job.grid import AXES, GRID_AXES, groups_of, rank_of
from meshwright.job.layout import Layout
from meshwright.job.nodes import NODE_AXES, node_groups
from meshwright.ledger.ledger import Ledger, RankLedger, Send

Traffic = dict[tuple[int, int], dict[str, float]]
"""Wire bytes of one step by (sender, receiver), then by axis."""


def rank_traffic(ledger: Ledger, layout: Layout, node_size: int | None = None) -> Traffic:
    """Wire bytes from each rank to each other in one step.

    A pipeline message goes to the rank of the next or the previous stage. A collective's bytes go in equal parts to
    the other ranks of its group where the backend is Gloo (the program exchanges directly there), and to the next
    rank of the group where it is NCCL, which arranges a group in a ring. What a rank sends is exact either way; only
    its division among the receivers is this picture's.

    Args:
        ledger: whose sends are drawn.
        layout: its ranks.
        node_size: ranks of a node, where gradients are summed on two levels (``job.nodes``).
    """
    places = {axis: _places(groups_of(layout, axis)) for axis in AXES}
    if node_size is not None:
        places |= {axis: _places(node_groups(layout, node_size, axis)) for axis in NODE_AXES}
    found: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for entry in ledger.ranks:
        for send in entry.sends:
            receivers = _receivers(layout, entry, send, places, ring=ledger.backend == "nccl")
            for receiver in receivers:
                found[entry.rank, receiver][send.axis] += send.wire / len(receivers)
    return {pair: dict(axes) for pair, axes in sorted(found.items())}


def by_node(traffic: Traffic, ranks_per_node: int) -> Traffic:
    """The same between nodes (or any blocks of that many ranks); the diagonal is what stays inside."""
    found: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (sender, receiver), axes in traffic.items():
        for axis, size in axes.items():
            found[sender // ranks_per_node, receiver // ranks_per_node][axis] += size
    return {pair: dict(axes) for pair, axes in sorted(found.items())}


def _places(groups: Sequence[tuple[int, ...]]) -> dict[int, tuple[tuple[int, ...], int]]:
    """Of each rank: its group, and where in it the rank stands."""
    return {rank: (group, index) for group in groups for index, rank in enumerate(group)}


def _receivers(
    layout: Layout,
    entry: RankLedger,
    send: Send,
    places: dict[str, dict[int, tuple[tuple[int, ...], int]]],
    *,
    ring: bool,
) -> tuple[int, ...]:
    if send.axis == "pp" and send.operation == "send":
        return tuple(_neighbours(layout, entry, send.phase))
    if send.axis == "embedding":  # the two ranks that hold the copies of a tied embedding
        holders = {_at(layout, entry, stage) for stage in (0, layout.stage_count - 1)}
        return tuple(holders - {entry.rank})
    group, index = places.get(send.axis, {}).get(entry.rank, ((entry.rank,), 0))
    if ring:
        return (group[(index + 1) % len(group)],) if len(group) > 1 else ()
    return group[:index] + group[index + 1 :]


def _neighbours(layout: Layout, entry: RankLedger, phase: str) -> Iterator[int]:
    """The receivers of a rank's pipeline messages, one for each of its stages that sends: all are of one size."""
    step = -1 if phase == "backward" else 1
    for stage in layout.stages_of(entry.place["pp"]):
        if 0 <= stage + step < layout.stage_count:
            receiver = _at(layout, entry, stage + step)
            if receiver != entry.rank:
                yield receiver


def _at(layout: Layout, entry: RankLedger, stage: int) -> int:
    """The rank of another stage with this rank's place on the other axes."""
    pp = next(pp for pp in range(layout.pp) if stage in layout.stages_of(pp))
    place = {**entry.place, "pp": pp}
    first, second, third, fourth = (place[axis] for axis in GRID_AXES)
    return rank_of(layout, (first, second, third, fourth))
