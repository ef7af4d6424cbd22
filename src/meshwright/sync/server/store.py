"""What a replica asks of the thing that holds parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Store(Protocol):
    """One shard's parameters and optimizer; chunks always in the same order. All arithmetic is deterministic."""

    updates: int
    """Optimizer steps applied."""

    def values(self) -> list[Tensor]:
        """Copies of the chunks in the type that workers compute in."""

    def add_up(self, parts: Sequence[Sequence[Tensor]]) -> float:
        """Sum pushes, in the order given, into the gradients; the largest absolute element (infinite for NaN)."""

    def squares(self, peak: float) -> tuple[float, float]:
        """Sum of squares of the gradients in two exact parts; ``peak`` is the largest element over all shards."""

    def update(self, rate: float, factor: float) -> None:
        """Scale the gradients by ``factor`` and let the optimizer step."""

    def state(self) -> list[Tensor]:
        """Parameters and optimizer tensors, not copied."""

    def restore(self, tensors: Sequence[Tensor], updates: int) -> None:
        """Take over another replica's ``state`` and number of updates."""
