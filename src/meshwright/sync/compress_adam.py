"""1-bit Adam and 0/1 Adam: once Adam's variance hardly moves, only the momentum must travel, and one bit of it will do.

Tang et al., "1-bit Adam", ICML 2021; Lu et al., "Maximizing communication efficiency for large-scale training via 0/1
Adam", ICLR 2023. With m the momentum all ranks hold, and rank i of P its part g_i of the gradient:

    full round      g = sum_i g_i                          m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
    1-bit round     m_i = b1 m / P + (1 - b1) g_i          m <- sum of one-bit m_i     v stays
                    (signs with a scale a block, both stages of ``sync.two_stage`` fed back)

    1-bit Adam      full rounds during the warm-up, then 1-bit rounds
    0/1 Adam        full rounds ever more rarely from the first step on: the j-th is 2^(j // 16) steps after the one
                    before; 1-bit rounds between them

The update is Adam's own. What the optimizer is handed in a 1-bit round is the gradient that leads it to the new m,
``(m_new - b1 m) / (1 - b1)``; it must leave v alone in those rounds (``full`` says which they are).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.copies import Span
from meshwright.comm.operations import Operations, sum_in_place
from meshwright.job.adam_rounds import full_round
from meshwright.sync.compress_sign import Sign
from meshwright.sync.memory import Memories
from meshwright.sync.two_stage import TwoStage


class OneBitMomentum:
    """Sums buffers over a group as either Adam does; needs every rank to hold all of the momentum.

    Args:
        memories: where momentum and residuals are kept.
        kind: which of the two.
        beta: Adam's first, b1.
        block: elements that share a scale.
        warmup_steps: full rounds at the start.
    """

    def __init__(
        self,
        memories: Memories,
        *,
        kind: Literal["one-bit-adam", "zero-one-adam"],
        beta: float,
        block: int,
        warmup_steps: int,
    ) -> None:
        self.memories, self.kind, self.beta, self.warmup_steps = memories, kind, beta, warmup_steps
        self._signs = TwoStage(Sign(block, "l2"), memories)
        self.full = True
        """Whether this step is a full round."""

    def begin(self, step: int) -> None:
        """A step (from 0) starts."""
        self._signs.begin(step)
        self.full = full_round(self.kind, step, self.warmup_steps)

    def prepare(
        self, name: str, level: str, start: int, like: Tensor, group: dist.ProcessGroup, spans: Sequence[Span]
    ) -> None:
        """See ``TwoStage.prepare``."""
        self._signs.prepare(name, level, start, like, group, spans)
        self.memories.make(name, level, "momentum", start, like)

    def scatter(self, name: str, level: str, output: Tensor, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """Every rank needs the whole momentum, so there is no sum that stops at an owner."""
        raise NotImplementedError("one-bit momentum is held whole on every rank")

    def sum(self, name: str, level: str, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """Replace ``values``, this rank's part of a gradient, by the gradient that leads to the new momentum."""
        memory, beta = self.memories.get(name, level, "momentum"), self.beta
        if self.full:
            yield from sum_in_place(values, group)
            memory.update().mul_(beta).add_(values, alpha=1.0 - beta)
            return
        values.mul_(1.0 - beta).add_(memory.now, alpha=beta / group.size())
        yield from self._signs.sum(name, level, values, group)
        momentum = memory.update()
        momentum.mul_(-beta).add_(values).div_(1.0 - beta)  # the gradient; then the two change places
        gradient = momentum.clone()
        momentum.copy_(values)
        values.copy_(gradient)
