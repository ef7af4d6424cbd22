"""How the data parallel ranks divide a buffer of gradients, and where parameters stand in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Copies:
    """How the dp ranks divide a bucket: rank ``(copy, shard)`` of ``copies x shards``.

    ``dp`` ranks are numbered ``copy * shards + shard``.
    """

    dp: dist.ProcessGroup
    shard: dist.ProcessGroup | None
    """The ranks that share one copy; None when every rank holds all of it."""
    copy: dist.ProcessGroup | None
    """The ranks that hold copies of one chunk; None when there is one copy."""

    @property
    def shards(self) -> int:
        """Chunks of a bucket."""
        return 1 if self.shard is None else self.shard.size()

    @property
    def copies(self) -> int:
        """Ranks that update the same chunk."""
        return 1 if self.copy is None else self.copy.size()

    @property
    def degree(self) -> int:
        """All dp ranks."""
        return self.shards * self.copies

    def chunk(self, size: int) -> tuple[int, int]:
        """(start, stop) of the elements this rank updates, of ``size``."""
        index = 0 if self.shard is None else self.shard.rank()
        return index * (size // self.shards), (index + 1) * (size // self.shards)

    def piece(self, size: int) -> tuple[int, int]:
        """(start, stop) of the elements this rank alone sums, a part of its chunk."""
        start, _ = self.chunk(size)
        start += (0 if self.copy is None else self.copy.rank()) * (size // self.degree)
        return start, start + size // self.degree


@dataclass(frozen=True)
class Span:
    """Where one parameter, or this rank's view of a part of it, stands in a buffer of gradients."""

    name: str
    """Physical name with its stage: ``stage0:layers.7.mlp.down.weight``."""
    start: int
    """First element in the buffer."""
    shape: tuple[int, ...]
