"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

Element ``i`` of a stream is a function of the stream's key and ``i`` only, so every rank computes just its own
slice and every layout sees the same numbers. The same code runs on CPU, CUDA and fake tensors.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

Key = tuple[int, int]
"""Two 32-bit words."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def derive_key(*parts: object) -> Key:
    """The key of the stream named by ``parts`` (seed, full name, ...), through BLAKE2b."""
    text = "\0".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"meshwright").digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox on each counter.

    Args:
        counter: four int64 tensors of unsigned 32-bit words, broadcastable against each other.
        key: two unsigned 32-bit words.

    Returns:
        Four int64 tensors of unsigned 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # the 64-bit product wraps into int64; shifting arithmetically and masking still yields its high word
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def words(key: Key, starts: Tensor, width: int, stream: Tensor | None = None) -> Tensor:
    """The 32-bit words of elements ``starts[r] .. starts[r] + width - 1``.

    Element ``i`` is word ``i % 4`` of the counter ``(i // 4, 0, stream, 0)``.

    Args:
        key: of the stream.
        starts: ``[rows]`` int64, first element of each row.
        width: elements per row.
        stream: ``[rows]`` int64, a further 32-bit number that selects the sequence; 0 when absent.

    Returns:
        ``[rows, width]`` int64 in ``[0, 2**32)``.
    """
    blocks = (width + 3) // 4 + 1  # a row may start inside a block
    first = starts >> 2
    index = first[:, None] + torch.arange(blocks, device=starts.device)
    zero = torch.zeros((), dtype=torch.int64, device=starts.device)
    third = zero if stream is None else (stream & _MASK)[:, None]
    out = torch.stack(philox4x32((index & _MASK, index >> 32, third, zero), key), dim=2).view(len(starts), -1)
    offset = (starts - (first << 2))[:, None] + torch.arange(width, device=starts.device)
    return out.gather(1, offset)


def uniform(key: Key, starts: Tensor, width: int, stream: Tensor | None = None) -> Tensor:
    """Float64 numbers in the open interval (0, 1); arguments and shape as in ``words``."""
    return (words(key, starts, width, stream).double() + 0.5) * 2.0**-32


def normal(key: Key, starts: Tensor, width: int) -> Tensor:
    """Standard normal float64 numbers by Box and Muller (1958); arguments and shape as in ``words``.

    Elements ``2j`` and ``2j + 1`` are the cosine and sine branch of one pair of uniforms.
    """
    even = starts - (starts & 1)
    pairs = uniform(key, even, width + 1 + (width + 1) % 2).view(len(starts), -1, 2)
    radius = (-2.0 * pairs[:, :, 0].log()).sqrt_()
    angle = pairs[:, :, 1] * (2.0 * math.pi)
    out = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=2).view(len(starts), -1)
    offset = (starts & 1)[:, None] + torch.arange(width, device=starts.device)
    return out.gather(1, offset)
