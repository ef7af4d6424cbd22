"""The rules of ``sync.compression_level = "slow"``, which compresses one of two levels of a sum; one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.job.nodes import node_degree
from meshwright.job.sentences import either


def slow_level_problems(job: Job) -> Iterator[str]:
    """Everything that does not fit, of a job that compresses gradients at the slow level alone."""
    layout, size = job.layout, job.sync.node_size
    if layout.zero and layout.shard_degree > 1:
        yield from _sharded(layout, size)
        return
    if layout.placement is not None and sorted(layout.placement) != list(range(layout.ranks)):
        return  # said of the layout
    legal = _legal_sizes(layout)
    if not legal:
        yield (
            f"sync.compression_level: slow compresses between nodes of several dp ranks each, but dp={layout.dp} "
            f"makes no two such nodes under layout {layout}; use a dp such as 4, or compression_level=all"
        )
    elif size is None:
        yield (
            "sync.node_size is missing, but sync.compression_level=slow with replicated state must know which ranks "
            f"share a node; give the ranks of a node, {either(legal)}"
        )
    elif (inside := node_degree(layout, size)) is None or not 1 < inside < layout.dp:
        what = "unequal numbers of" if inside is None else f"all {inside}" if inside == layout.dp else "one of the"
        yield (
            f"sync.node_size: {size} puts {what} dp ranks in a node under layout {layout}, but "
            f"compression_level=slow needs several nodes of as many each, at least 2; use {either(legal)}"
        )
    elif job.sync.compression == "powersgd":
        yield (
            f"sync.compression: powersgd needs whole matrices, but compression_level=slow gives each of the {inside} "
            f"dp ranks of a node a piece of every buffer, which cuts them; use compression_level=all, or zero=2 or 3 "
            f"with shard={inside}, which keep rows whole"
        )


def _sharded(layout: Layout, size: int | None) -> Iterator[str]:
    if layout.shard_degree == layout.dp:
        yield (
            f"sync.compression_level: slow leaves the sum inside a copy of the state whole, but layout {layout} has "
            "one copy; use a shard between 1 and dp, zero=0 with sync.node_size, or compression_level=all"
        )
    elif size is not None:
        yield (
            f"sync.node_size: {size} is not used with zero={layout.zero}, where shard={layout.shard} says which ranks "
            "sum whole; leave it out"
        )


def _legal_sizes(layout: Layout) -> list[int]:
    """Nodes of whole tensor parallel groups that divide the dp ranks."""
    whole = [layout.tp * inside for inside in range(2, layout.dp) if layout.dp % inside == 0]
    return [size for size in whole if 1 < (node_degree(layout, size) or 0) < layout.dp]
