"""QSGD: few levels, rounded at random so that the expectation is the number itself.

Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", NeurIPS 2017. In a block
``v`` of d numbers, with s levels:

    Q(v_i) = |v|_2 sign(v_i) xi_i / s          a = s |v_i| / |v|_2,  xi_i = floor(a), or 1 more with chance a - floor(a)
    E Q(v) = v          E |Q(v) - v|^2 <= min(d / s^2, sqrt(d) / s) |v|^2

A level and its sign take ``bits`` bits: s = 2^(bits-1) - 1, that is 1, 7 or 127. Nothing is fed back: the error has
expectation zero, and where the bound above exceeds 1 (long blocks of few levels) feeding it back would let it grow.
The draw is a function of the key alone (job, buffer, rank, step), so a run repeats and a resumed run goes on alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.sync.codec import block_count, in_blocks, join, pack_bits, split, unpack_bits

_KEYS = 2**63


@dataclass(frozen=True)
class Qsgd:
    """Sign and level of each number in ``bits`` bits, and the length of each block."""

    block: int
    bits: Literal[2, 4, 8] = 4

    @property
    def levels(self) -> int:
        """The largest level, s."""
        return (1 << (self.bits - 1)) - 1

    def encode(self, rows: Tensor, key: int) -> Tensor:
        """See ``Codec.encode``."""
        generator = torch.Generator(rows.device).manual_seed(key % _KEYS)
        drawn = torch.rand(rows.shape, dtype=rows.dtype, device=rows.device, generator=generator)
        return self.encode_with(rows, drawn)

    def encode_with(self, rows: Tensor, drawn: Tensor) -> Tensor:
        """Encode with given numbers in [0, 1): a level is rounded up where its fraction is above the number."""
        lengths = in_blocks(rows, self.block).norm(dim=2)
        each = lengths.repeat_interleave(self.block, dim=1)[:, : rows.shape[1]]
        scaled = torch.where(each > 0, rows.abs() / each, 0.0) * self.levels
        level = scaled.floor()
        level = (level + (scaled - level > drawn)).clamp_(max=self.levels)
        signed = torch.where(rows < 0, -level, level) + self.levels
        return join(lengths, pack_bits(signed.to(torch.uint8), self.bits))

    def decode(self, payload: Tensor, count: int, wide: torch.dtype) -> Tensor:
        """See ``Codec.decode``."""
        lengths, packed = split(payload, block_count(count, self.block), wide)
        signed = unpack_bits(packed, self.bits, count).to(wide).sub_(self.levels).div_(self.levels)
        return signed.mul_(lengths.repeat_interleave(self.block, dim=1)[:, :count])
