"""Gradients summed in compressed form: which of the sums over a buffer are compressed, and what it costs in memory.

A buffer is summed over the ranks that share one copy of the state (``shard``) and over the copies of a chunk
(``copy``); see ``comm.copies``. The first usually runs inside a node, the second between nodes:

                          shard            copy
    replicated            -                compressed
    ZeRO-1, 2, 3          compressed       -
    with copies of it     compressed       compressed            ``only_slow``: the second alone, between nodes

Every compressed sum keeps a residual of all values it was handed (ZeRO-2 and 3: of whole groups, so that what they save
on gradients is spent again; ``only_slow`` keeps a residual of this rank's chunk alone).

Replicated ranks have the two levels of ``only_slow`` where it is known which of them share a node (``nodes``): those of
a node sum whole and each keeps a piece, pieces are summed compressed between nodes, and gathered whole in the node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import all_gather, reduce_scatter
from meshwright.comm.copies import Copies, Span
from meshwright.comm.operations import Operations, shards_then_copies, started, sum_in_place
from meshwright.sync.memory import Memories


class GroupSum(Protocol):
    """One way to sum a buffer over one group in compressed form."""

    def begin(self, step: int) -> None:
        """A step (from 0) starts."""

    def prepare(
        self, name: str, level: str, start: int, like: Tensor, group: dist.ProcessGroup, spans: Sequence[Span]
    ) -> None:
        """Hear of a buffer, or a chunk of one that begins at its element ``start``, before its first use."""

    def scatter(self, name: str, level: str, output: Tensor, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """Sum ``values`` (``[P * n]``, used up) over the group; this rank's row into ``output`` (``[n]``)."""

    def sum(self, name: str, level: str, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """Sum ``values`` over the group in place, the same bits on every rank."""


class PlainSum:
    """The uncompressed sum, for the levels that stay so and for a warm-up."""

    def begin(self, step: int) -> None:
        """Nothing depends on the step."""

    def prepare(
        self, name: str, level: str, start: int, like: Tensor, group: dist.ProcessGroup, spans: Sequence[Span]
    ) -> None:
        """Nothing is remembered."""

    def scatter(self, name: str, level: str, output: Tensor, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """See ``GroupSum.scatter``."""
        yield started(reduce_scatter(output, values, group, asynchronous=True))

    def sum(self, name: str, level: str, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """See ``GroupSum.sum``."""
        return sum_in_place(values, group)


class CompressedReducer:
    """The reducer of ``parallel.reducing`` that compresses.

    Args:
        method: how one buffer is summed over one group.
        memories: of ``method``.
        dtype: in which gradients are summed.
        device: where they are.
        only_slow: leave the sum over the shard ranks uncompressed.
        nodes: with ``only_slow`` and replicated state: the dp ranks as nodes (``copy``) of several ranks (``shard``).
        warmup_steps: steps at the start that are not compressed at all.
    """

    def __init__(
        self,
        method: GroupSum,
        memories: Memories,
        *,
        dtype: torch.dtype,
        device: torch.device,
        only_slow: bool = False,
        nodes: Copies | None = None,
        warmup_steps: int = 0,
    ) -> None:
        self.method, self.memories = method, memories
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._plain, self._only_slow, self._warmup_steps = PlainSum(), only_slow, warmup_steps
        self._nodes, self._step = nodes, 0
        self._sharers: dict[str, int] = {}
        self.spans: dict[str, tuple[Span, ...]] = {}
        """The parameters in each buffer."""

    def begin(self, step: int) -> None:
        """A step (from 0) starts."""
        self._step = step
        self.method.begin(step)

    def settle(self, applied: bool) -> None:
        """A step has ended; if it was not applied, nothing of it is remembered."""
        self.memories.settle(applied)

    def prepare(self, name: str, size: int, spans: Sequence[Span], copies: Copies) -> None:
        """See ``Reducer.prepare``."""
        self.spans[name] = tuple(spans)
        copies = copies if self._nodes is None else self._nodes
        self._sharers = {"shard": copies.degree, "copy": copies.copies}
        start, stop = copies.chunk(size)
        if copies.shard is not None and not self._only_slow:
            self.method.prepare(name, "shard", 0, self._like.new_empty(size), copies.shard, spans)
        if copies.copy is not None:
            padded = -(-(stop - start) // copies.copies) * copies.copies
            inside = [span for span in spans if start <= span.start < stop]
            self.method.prepare(name, "copy", start, self._like.new_empty(padded), copies.copy, inside)

    def reduce(self, name: str, gradient: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.reduce``."""
        if self._nodes is None:
            return shards_then_copies(self, name, gradient, copies)
        return self._by_node(name, gradient, self._nodes)

    def _by_node(self, name: str, gradient: Tensor, nodes: Copies) -> Operations:
        yield from shards_then_copies(self, name, gradient, nodes)
        assert nodes.shard is not None
        start, stop = nodes.chunk(gradient.numel())
        yield started(all_gather(gradient, gradient[start:stop], nodes.shard, asynchronous=True))

    def scatter(self, name: str, output: Tensor, contributions: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.scatter``."""
        assert copies.shard is not None
        method = self._plain if self._only_slow or self._warming else self.method
        yield from method.scatter(name, "shard", output, contributions, copies.shard)

    def across(self, name: str, chunk: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.across``."""
        if copies.copy is not None:
            method = self._plain if self._warming else self.method
            yield from method.sum(name, "copy", chunk, copies.copy)

    def sharers(self, level: str) -> int:
        """Ranks whose residuals of the sum at ``level`` ("shard" or "copy") are of the same elements."""
        return self._sharers[level]

    @property
    def _warming(self) -> bool:
        return self._step < self._warmup_steps

    def state(self) -> dict[str, Tensor]:
        """See ``Reducer.state``."""
        return {f"{memory.buffer}/{memory.level}/{memory.what}": memory.kept for memory in self.memories}


class ClippingReducer(CompressedReducer):
    """Deep gradient compression with local clipping: nothing is sent before all of this rank's gradients are there.

    Args:
        limit: of the length of the sum; each of N ranks holds its own below ``limit / sqrt(N)``.
    """

    def __init__(
        self,
        method: GroupSum,
        memories: Memories,
        *,
        dtype: torch.dtype,
        device: torch.device,
        only_slow: bool,
        nodes: Copies | None,
        limit: float,
    ) -> None:
        super().__init__(method, memories, dtype=dtype, device=device, only_slow=only_slow, nodes=nodes)
        self._limit, self._ranks = limit, 1

    def prepare(self, name: str, size: int, spans: Sequence[Span], copies: Copies) -> None:
        """See ``Reducer.prepare``."""
        self._ranks = copies.degree
        super().prepare(name, size, spans, copies)

    def ready(self, gradients: Sequence[Tensor]) -> None:
        """All buffers of the step are full: scale them down if they are too long together."""
        limit = self._limit / math.sqrt(self._ranks)
        length = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        if length > limit:
            torch._foreach_mul_(list(gradients), limit / length)
