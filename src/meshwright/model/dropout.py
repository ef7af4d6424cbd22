"""Dropout whose mask is a function of (seed, step, example, layer, site, element) only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.model.philox import derive_key, words

_CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class Randomness:
    """The random numbers of one training step. Stateless: a recomputed layer draws the same mask."""

    seed: int
    step: int

    def keep(self, probability: float, layer: int, site: str, examples: Tensor, starts: Tensor, width: int) -> Tensor:
        """Which elements survive dropout with the given drop ``probability``.

        Args:
            probability: of dropping an element.
            layer: global layer index; -1 for the embedding.
            site: name of the place inside the layer.
            examples: ``[rows]`` global example number of each row.
            starts: ``[rows]`` element index, within its example, of each row's first element.
            width: elements per row.

        Returns:
            ``[rows, width]`` bool.
        """
        key = derive_key(self.seed, "dropout", self.step, layer, site)
        threshold = round(probability * 2**32)
        step = max(1, _CHUNK_ELEMENTS // max(1, width))
        pieces = [
            words(key, starts[row : row + step], width, examples[row : row + step]) >= threshold
            for row in range(0, len(starts), step)
        ]
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]


def dropped(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """``x`` where ``keep``, else 0, scaled by ``1 / (1 - probability)``. Saves only the bool mask."""
    result: Tensor = _Dropped.apply(x, keep, 1.0 / (1.0 - probability))  # type: ignore[no-untyped-call]
    return result


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (keep,) = ctx.saved_tensors
        return (gradients[0] * keep).mul_(ctx.scale), None, None
