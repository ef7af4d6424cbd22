"""What a compressor remembers from step to step, and takes back when a step is not applied.

A step whose gradients are not finite is applied on no rank, so it must leave no trace in the residuals either. Every
memory therefore has two buffers: a step writes into the one that does not count yet, and ``settle`` decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

What = Literal["residual", "velocity", "momentum", "basis"]
"""What is remembered:

residual    what this rank has not sent yet of its gradients; over ranks, memories add up
velocity    momentum of this rank's gradients (deep gradient compression); adds up too
momentum    the momentum of all ranks (1-bit Adam); the same on every rank
basis       the column space of the last step (PowerSGD); the same on every rank; only a better start
"""


@dataclass
class Memory:
    """One remembered tensor of one buffer of gradients."""

    buffer: str
    """Name of the buffer of gradients."""
    level: str
    """Which sum over the buffer it belongs to: over the shards, over the copies, or what is sent back."""
    what: What
    start: int
    """Where in the buffer its elements begin (``basis``: 0)."""
    kept: Tensor
    """The state after the last step that was applied."""
    spare: Tensor
    changed: bool = False
    """Whether ``spare`` holds the state after the current step."""

    @property
    def now(self) -> Tensor:
        """The state that the current step has brought so far."""
        return self.spare if self.changed else self.kept

    def update(self) -> Tensor:
        """The buffer to write the new state into; it holds the current one."""
        if not self.changed:
            self.spare.copy_(self.kept)
            self.changed = True
        return self.spare

    def difference(self, wanted: Tensor, sent: Tensor) -> None:
        """Make ``wanted - sent`` the new state."""
        torch.sub(wanted, sent, out=self.spare)
        self.changed = True

    def settle(self, applied: bool) -> None:
        """The step is over: its state counts, or the one before it does."""
        if self.changed and applied:
            self.kept, self.spare = self.spare, self.kept
        self.changed = False


class Memories:
    """All memories of one rank's compressor."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, str, What], Memory] = {}

    def make(self, buffer: str, level: str, what: What, start: int, like: Tensor) -> Memory:
        """A new memory, zero, of the shape and type of ``like``."""
        memory = Memory(buffer, level, what, start, torch.zeros_like(like), torch.zeros_like(like))
        self._all[buffer, level, what] = memory
        return memory

    def find(self, buffer: str, level: str, what: What) -> Memory | None:
        """A memory that was made before; None if there is none."""
        return self._all.get((buffer, level, what))

    def get(self, buffer: str, level: str, what: What) -> Memory:
        """A memory that was made before."""
        return self._all[buffer, level, what]

    def settle(self, applied: bool) -> None:
        """See ``Memory.settle``, for all of them."""
        for memory in self._all.values():
            memory.settle(applied)

    def __iter__(self) -> Iterator[Memory]:
        return iter(self._all.values())

    @property
    def nbytes(self) -> int:
        """Bytes held, both buffers of each."""
        return sum(2 * memory.kept.numel() * memory.kept.element_size() for memory in self)
