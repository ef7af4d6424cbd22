"""8-bit numbers with a scale for each block: int8 (evenly spaced) or fp8 e4m3 (finer near zero).

    int8    q = round(x / s),  s = max|x| / 127         |error| <= s / 2
    fp8     q = e4m3(x / s),   s = max|x| / 448         |error| <= 2^-4 |x|, and at most s 2^-10 below s 2^-6

A sum over any number of ranks rounds exactly twice (``sync.two_stage``): once on the way to the rank that adds, in the
wide type, and once on the way back. This is the reduction of ZeRO++ (Wang et al., 2023: qgZ) without its two hops.
Numbers that the grid holds come through unchanged when the scale is a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.sync.codec import as_bytes, block_count, in_blocks, join, split

_LARGEST = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True)
class BlockScaled:
    """One byte a number and a scale a block."""

    block: int
    kind: Literal["int8", "fp8"] = "int8"

    def encode(self, rows: Tensor, key: int) -> Tensor:
        """See ``Codec.encode``."""
        scales = in_blocks(rows, self.block).abs().amax(2) / _LARGEST[self.kind]
        each = scales.repeat_interleave(self.block, dim=1)[:, : rows.shape[1]]
        scaled = torch.where(each > 0, rows / each, 0.0)
        if self.kind == "int8":
            return join(scales, as_bytes(scaled.round_().clamp_(-127, 127).to(torch.int8)))
        return join(scales, as_bytes(scaled.clamp_(-448, 448).to(torch.float8_e4m3fn)))

    def decode(self, payload: Tensor, count: int, wide: torch.dtype) -> Tensor:
        """See ``Codec.decode``."""
        scales, values = split(payload, block_count(count, self.block), wide)
        narrow = torch.int8 if self.kind == "int8" else torch.float8_e4m3fn
        wide_values = values.contiguous().view(narrow).view(payload.shape[0], count).to(wide)
        return wide_values.mul_(scales.repeat_interleave(self.block, dim=1)[:, :count])
