"""Which server owns which part of the parameters: balanced by size, or by consistent hashing.

Parameters are cut into chunks of at most ``CHUNK_BYTES``; chunks never cross parameters.

* ``size``: chunks by falling size, each to the shard that has least so far (longest processing time first, Graham
  1969: the fullest shard holds at most 4/3 - 1/(3S) of the best possible).
* ``hash``: every shard stands at ``VIRTUAL`` points of a ring (Karger et al. 1997); a chunk belongs to the next point
  after its own. One shard more moves about 1/(S+1) of the chunks, all of them to the new one.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Policy = Literal["size", "hash"]

CHUNK_BYTES = 4 * 2**20
VIRTUAL = 256


@dataclass(frozen=True)
class Chunk:
    """Elements ``[start, stop)`` of a flattened parameter."""

    parameter: str
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Elements."""
        return self.stop - self.start


def cut(sizes: Mapping[str, int], limit: int) -> list[Chunk]:
    """Every parameter (name: elements) in chunks of at most ``limit`` elements, of nearly equal size."""
    chunks = []
    for name, size in sizes.items():
        pieces = max(1, -(-size // limit))
        bounds = [size * index // pieces for index in range(pieces + 1)]
        chunks += [Chunk(name, low, high) for low, high in pairwise(bounds) if high > low]
    return chunks


def place(sizes: Mapping[str, int], shards: int, policy: Policy, *, limit: int) -> list[list[Chunk]]:
    """The chunks of each shard, in the order of the parameters. A function of its arguments alone.

    Args:
        sizes: elements by parameter, in the model's order.
        shards: how many.
        policy: see the module.
        limit: most elements of a chunk.
    """
    chunks = cut(sizes, limit)
    owner = _by_size(chunks, shards) if policy == "size" else _by_hash(chunks, shards)
    return [[chunk for chunk, mine in zip(chunks, owner, strict=True) if mine == shard] for shard in range(shards)]


def _by_size(chunks: Sequence[Chunk], shards: int) -> list[int]:
    owner, load = [0] * len(chunks), [0] * shards
    for index in sorted(range(len(chunks)), key=lambda index: (-chunks[index].count, index)):
        shard = min(range(shards), key=lambda shard: (load[shard], shard))
        owner[index] = shard
        load[shard] += chunks[index].count
    return owner


def _by_hash(chunks: Sequence[Chunk], shards: int) -> list[int]:
    points = sorted((_point(f"shard {shard} {turn}"), shard) for shard in range(shards) for turn in range(VIRTUAL))
    places = [point for point, _ in points]
    owner = []
    for chunk in chunks:
        index = bisect.bisect_right(places, _point(f"{chunk.parameter} {chunk.start}")) % len(points)
        owner.append(points[index][1])
    return owner


def filled_by_hashing(chunks: Sequence[Chunk], most: int) -> list[int]:
    """Numbers of shards, 1 to ``most``, none of which consistent hashing leaves without chunks."""
    return [shards for shards in range(1, most + 1) if len(set(_by_hash(chunks, shards))) == shards]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
