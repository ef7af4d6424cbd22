"""Which data parallel ranks share a node, where ``sync.node_size`` says how many consecutive ranks do.

Tensor and pipeline ranks count in a node; only dp ranks of one column are summed with each other:

    dp=4 tp=2, node_size=4       node 0                    node 1
    ranks                        0 1 2 3                   4 5 6 7
    (dp, tp)                     0,0 0,1 1,0 1,1           2,0 2,1 3,0 3,1

    intra    the dp ranks of one node:                  0 2 | 1 3 | 4 6 | 5 7
    inter    those at one place, one of each node:      0 4 | 1 5 | 2 6 | 3 7
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.job.grid import groups_of
from meshwright.job.job import Job
from meshwright.job.layout import Layout

NODE_AXES: tuple[str, ...] = ("intra", "inter")
"""The axes into which the dp ranks divide."""


def compressed_node_size(job: Job) -> int | None:
    """``sync.node_size`` where the gradients of replicated ranks are compressed between nodes alone; otherwise None."""
    sync, layout = job.sync, job.layout
    replicated = layout.zero == 0 or layout.shard_degree == 1
    slow = sync.compression != "none" and sync.compression_level == "slow"
    return sync.node_size if replicated and slow else None


@lru_cache(maxsize=64)
def node_degree(layout: Layout, node_size: int) -> int | None:
    """Ranks of a dp group that are in one node; None where that is not the same in every node."""
    counts = {len(node) for nodes in _by_node(layout, node_size) for node in nodes}
    return counts.pop() if len(counts) == 1 else None


def node_groups(layout: Layout, node_size: int, axis: str) -> list[tuple[int, ...]]:
    """The groups of global ranks along ``intra`` or ``inter``; every rank is in exactly one.

    The layout is one of which ``node_degree`` is a number.
    """
    if axis == "intra":
        return [node for nodes in _by_node(layout, node_size) for node in nodes]
    return [lane for nodes in _by_node(layout, node_size) for lane in zip(*nodes, strict=True)]


def _by_node(layout: Layout, node_size: int) -> list[list[tuple[int, ...]]]:
    """Of each dp group its ranks, node by node."""
    found = []
    for group in groups_of(layout, "dp"):
        nodes: dict[int, list[int]] = {}
        for rank in group:
            nodes.setdefault(rank // node_size, []).append(rank)
        found.append([tuple(node) for node in nodes.values()])
    return found
