"""Deep gradient compression: only the largest elements travel; the others wait, with the momentum they would have had.

Lin et al., "Deep gradient compression", ICLR 2018, algorithm 1 and section 3. Each rank, of its own gradient g:

    g <- g min(1, limit / (sqrt(N) |g|))          local clipping: N ranks' sum then has about the length ``limit``
    u <- m u + g          v <- v + u              momentum correction: what waits gathers the momentum of its gradients
    send the k = (1 - s) n elements of v that are largest in absolute value
    v <- 0 there          u <- 0 there            momentum factor masking: what was sent leaves no stale momentum

The optimizer then applies the sum without momentum of its own. With m = 0, v is the residual of plain top-k with error
feedback, ``sum sent + v = sum of gradients``; with momentum, ``sum sent + v = sum u``. Sparsity s rises over the
warm-up in equal parts: 75 %, 93.75 %, 98.4375 %, 99.6 %, then its own (the paper's is 99.9 %).

On the wire every element is its index and its value, 4 + 4 bytes in float32: s = 0.999 is 500 times fewer bytes than
the gradients themselves, not 1,000. Each rank's k elements go to every rank ((P-1) 8 k bytes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import all_gather
from meshwright.comm.copies import Span
from meshwright.comm.operations import Operations, started
from meshwright.sync.memory import Memories

WARM_UP = (0.75, 0.9375, 0.984375, 0.996)
"""Sparsity in the equal parts of the warm-up, as far as it is below the final one."""
INDEX_BYTES = 4
"""An index is an int32: a buffer has fewer than 2^31 elements."""


def sparsity_at(step: int, final: float, warmup_steps: int) -> float:
    """Sparsity of a step (from 0)."""
    if step >= warmup_steps:
        return final
    return min(WARM_UP[step * len(WARM_UP) // warmup_steps], final)


def kept_count(size: int, sparsity: float) -> int:
    """Elements of ``size`` that travel: at least one."""
    return min(size, max(1, math.ceil(round((1.0 - sparsity) * size, 6)))) if size else 0


def element_bytes(wide: torch.dtype) -> int:
    """Bytes of one element on the wire: index and value."""
    return INDEX_BYTES + wide.itemsize


class DeepGradientCompression:
    """Sums buffers over a group by their largest elements.

    Args:
        memories: where velocities and residuals are kept.
        sparsity: the part of the elements that does not travel.
        momentum: of the correction; 0: plain top-k.
        masking: momentum factor masking.
        warmup_steps: steps until ``sparsity`` is reached.
    """

    def __init__(
        self, memories: Memories, *, sparsity: float, momentum: float = 0.0, masking: bool = True, warmup_steps: int = 0
    ) -> None:
        self.memories, self.sparsity, self.momentum = memories, sparsity, momentum
        self.masking, self.warmup_steps = masking, warmup_steps
        self.step = 0

    def begin(self, step: int) -> None:
        """A step (from 0) starts."""
        self.step = step

    def prepare(
        self, name: str, level: str, start: int, like: Tensor, group: dist.ProcessGroup, spans: Sequence[Span]
    ) -> None:
        """See ``TwoStage.prepare``."""
        self.memories.make(name, level, "residual", start, like)
        # What comes out of a sum that was compressed has its momentum already.
        if self.momentum and not (level == "copy" and self.memories.find(name, "shard", "residual")):
            self.memories.make(name, level, "velocity", start, like)

    def choose(self, name: str, level: str, values: Tensor) -> tuple[Tensor, Tensor]:
        """Indices (int32, ``[k]``) and values of what travels of ``values`` (``[n]``, used up) and of what waited."""
        waiting = self.memories.get(name, level, "residual").update()
        velocity = self.memories.find(name, level, "velocity")
        if velocity is not None:
            first = not velocity.changed
            moving = velocity.update()
            if first:  # of the step; ZeRO-2 and 3 come once for every micro-batch
                moving.mul_(self.momentum)
                waiting.add_(moving)
            moving.add_(values)
        waiting.add_(values)
        count = kept_count(waiting.numel(), sparsity_at(self.step, self.sparsity, self.warmup_steps))
        chosen = waiting.abs().topk(count, sorted=False).indices
        sent = waiting[chosen]
        waiting[chosen] = 0.0
        if velocity is not None and self.masking:
            velocity.update()[chosen] = 0.0
        return chosen.to(torch.int32), sent

    def scatter(self, name: str, level: str, output: Tensor, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """Sum ``values`` (``[P * n]``, used up) over the group; this rank's row into ``output`` (``[n]``)."""
        payload = self._payload(name, level, values)
        gathered = payload.new_empty((group.size(), payload.numel()))
        yield started(all_gather(gathered, payload, group, asynchronous=True))
        count = output.numel()
        total = output.new_zeros(count + 1)  # what is other ranks' goes behind the end
        for indices, chosen in self._elements(gathered, output.dtype):
            mine = indices - group.rank() * count
            inside = (mine >= 0) & (mine < count)
            total.index_add_(0, torch.where(inside, mine, count), torch.where(inside, chosen, 0.0))
        output.copy_(total[:count])

    def sum(self, name: str, level: str, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """Sum ``values`` over the group in place, added in rank order, the same bits on every rank."""
        payload = self._payload(name, level, values)
        gathered = payload.new_empty((group.size(), payload.numel()))
        yield started(all_gather(gathered, payload, group, asynchronous=True))
        values.zero_()
        for indices, chosen in self._elements(gathered, values.dtype):
            values.index_add_(0, indices, chosen)

    def _payload(self, name: str, level: str, values: Tensor) -> Tensor:
        indices, chosen = self.choose(name, level, values)
        return torch.cat([indices.view(torch.uint8), chosen.view(torch.uint8)])

    def _elements(self, gathered: Tensor, wide: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices and values of every rank, in rank order; no index twice in one rank's."""
        count = gathered.shape[1] // element_bytes(wide)
        for row in gathered:
            indices = row[: count * INDEX_BYTES].clone().view(torch.int32).long()
            yield indices, row[count * INDEX_BYTES :].clone().view(wide)
