"""One bit a number: its sign, times a scale for each block.

Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019:

    C(x) = (|x|_1 / d) sign(x)      |C(x) - x|^2 = (1 - |x|_1^2 / (d |x|_2^2)) |x|^2

a contraction for every x, so with the residual fed back it converges as SGD does (plain SignSGD may not). Tang et al.,
"1-bit Adam", ICML 2021, scale by the Euclidean length instead, ``|x|_2 / sqrt(d)``, which keeps ``|C(x)|_2 = |x|_2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.sync.codec import (
    block_count,
    block_sizes,
    in_blocks,
    join,
    pack_bits,
    split,
    unpack_bits,
)


@dataclass(frozen=True)
class Sign:
    """Signs, and the mean absolute value (``"l1"``) or root mean square (``"l2"``) of each block."""

    block: int
    norm: Literal["l1", "l2"] = "l1"

    def encode(self, rows: Tensor, key: int) -> Tensor:
        """See ``Codec.encode``; zero counts as positive."""
        blocks = in_blocks(rows, self.block)
        sizes = block_sizes(rows.shape[1], self.block, rows)
        scales = blocks.abs().sum(2) / sizes if self.norm == "l1" else (blocks.square().sum(2) / sizes).sqrt()
        return join(scales, pack_bits((rows >= 0).to(torch.uint8), 1))

    def decode(self, payload: Tensor, count: int, wide: torch.dtype) -> Tensor:
        """See ``Codec.decode``."""
        scales, packed = split(payload, block_count(count, self.block), wide)
        signs = unpack_bits(packed, 1, count).to(wide).mul_(2).sub_(1)
        return signs.mul_(scales.repeat_interleave(self.block, dim=1)[:, :count])
