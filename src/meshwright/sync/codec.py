"""Codecs: how rows of numbers become bytes on the wire, every one of them counted.

A codec encodes each row of ``[rows, count]`` numbers by itself (a row is what one rank gets of a two-stage sum), in
blocks of consecutive elements that share a scale:

    row     | scale of block 0 | scale of block 1 | ... | values of block 0 | values of block 1 | ... |

The scale has the type in which gradients are summed (4 or 8 bytes); it is part of the payload. With one element a
block every codec here is exact up to rounding: the scale then carries the number.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Numbers to bytes and back."""

    def encode(self, rows: Tensor, key: int) -> Tensor:
        """``[rows, count]`` numbers as ``[rows, bytes]`` uint8, scales included; ``key`` seeds what is random."""

    def decode(self, payload: Tensor, count: int, wide: torch.dtype) -> Tensor:
        """The numbers ``[rows, count]`` of type ``wide`` that ``encode`` wrote."""


def block_count(count: int, block: int) -> int:
    """Blocks of ``block`` elements that hold ``count``; the last one may be shorter."""
    return -(-count // block)


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """``[rows, count]`` as ``[rows, blocks, block]``, the last block filled up with zeros."""
    count = rows.shape[1]
    blocks = block_count(count, block)
    if blocks * block != count:
        rows = torch.nn.functional.pad(rows, (0, blocks * block - count))
    return rows.reshape(rows.shape[0], blocks, block)


def block_sizes(count: int, block: int, like: Tensor) -> Tensor:
    """``[blocks]``: how many elements each block really has."""
    sizes = torch.full((block_count(count, block),), float(block), dtype=like.dtype, device=like.device)
    if count % block:
        sizes[-1] = count % block
    return sizes


def join(scales: Tensor, values: Tensor) -> Tensor:
    """``[rows, blocks]`` scales and ``[rows, bytes]`` uint8 values as one payload."""
    return torch.cat([as_bytes(scales), values], dim=1)


def split(payload: Tensor, blocks: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """What ``join`` put together."""
    scale_bytes = blocks * wide.itemsize
    scales = payload[:, :scale_bytes].clone(memory_format=torch.contiguous_format).view(wide)
    return scales, payload[:, scale_bytes:]


def as_bytes(rows: Tensor) -> Tensor:
    """``[rows, n]`` of any type as ``[rows, n * itemsize]`` uint8."""
    return rows.contiguous().view(torch.uint8).view(rows.shape[0], -1)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """``[rows, count]`` uint8 codes below ``2**bits`` (1, 2, 4 or 8 bits), ``8 / bits`` to a byte."""
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_byte))
    groups = padded.view(codes.shape[0], -1, per_byte)
    packed = groups[..., 0].clone()
    for index in range(1, per_byte):
        packed |= groups[..., index] << (bits * index)
    return packed


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The ``[rows, count]`` codes of ``pack_bits``."""
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    mask = (1 << bits) - 1
    codes = torch.stack([(packed >> (bits * index)) & mask for index in range(per_byte)], dim=-1)
    return codes.view(packed.shape[0], -1)[:, :count]
