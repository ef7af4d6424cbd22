"""Collectives one after another: a sequence starts an operation, and goes on once it has ended.

Whoever holds a sequence decides when to wait: at once, or after other work (``parallel.flight``, ``sync.run``).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import Handle, all_gather, reduce_scatter
from meshwright.comm.copies import Copies

Operations = Generator[Handle, None, None]
"""Starts an operation, yields its handle, and is resumed once the operation has ended."""


class Levels(Protocol):
    """What sums a buffer over the shards of a copy of the state, and over the copies of a shard."""

    def scatter(self, name: str, output: Tensor, contributions: Tensor, copies: Copies) -> Operations:
        """Sum ``contributions`` (``[shards * row]``) over the shards; this rank's row into ``output``."""

    def across(self, name: str, chunk: Tensor, copies: Copies) -> Operations:
        """Sum ``chunk`` in place over the copies, if there are several."""


def shards_then_copies(levels: Levels, name: str, gradient: Tensor, copies: Copies) -> Operations:
    """Sum ``gradient`` (``[size]``) over all dp ranks, so that this rank's chunk of it is right."""
    start, stop = copies.chunk(gradient.numel())
    chunk = gradient[start:stop]
    if copies.shard is not None:
        yield from levels.scatter(name, chunk, gradient, copies)
    yield from levels.across(name, chunk, copies)


def sum_in_place(values: Tensor, group: dist.ProcessGroup) -> Operations:
    """Sum ``values`` (``[P * n]``) over the group's P ranks: each sums a row, and gives it to all."""
    row = values.view(group.size(), -1)[group.rank()]
    yield started(reduce_scatter(row, values, group, asynchronous=True))
    yield started(all_gather(values, row, group, asynchronous=True))


def started(handle: Handle | None) -> Handle:
    """The handle of an operation that was started asynchronously."""
    assert handle is not None
    return handle
