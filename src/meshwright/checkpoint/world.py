"""The ranks that save or load together, and the small messages they exchange: JSON, never a pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.position import waiting


class World(Protocol):
    """Ranks that act together. Values are what JSON can hold."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on rank 0; elsewhere an empty list."""

    def scatter(self, values: Sequence[Any]) -> Any:
        """To each rank its entry of rank 0's ``values``."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""


class Alone:
    """One rank that is its own world."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """See :class:`World`."""
        return [value]

    def scatter(self, values: Sequence[Any]) -> Any:
        """See :class:`World`."""
        return values[0]

    def broadcast(self, value: Any) -> Any:
        """See :class:`World`."""
        return value


class GroupWorld:
    """The ranks of a process group (default: all). Rank 0 is the group's first."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        nccl = "nccl" in dist.get_backend(self.group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def gather(self, value: Any) -> list[Any]:
        """See :class:`World`."""
        mine = self._encode(value)
        lengths = self._lengths(mine.numel())
        padded = self._padded(mine, max(lengths))
        parts = [torch.empty_like(padded) for _ in lengths] if self.rank == 0 else None
        with waiting(self.group, "gather"):
            dist.gather(padded, parts, group=self.group, group_dst=0)
        return [self._decode(part, length) for part, length in zip(parts or [], lengths, strict=False)]

    def scatter(self, values: Sequence[Any]) -> Any:
        """See :class:`World`."""
        parts = [self._encode(value) for value in values] if self.rank == 0 else []
        lengths = self.broadcast([part.numel() for part in parts])
        mine = torch.empty(max(lengths), dtype=torch.uint8, device=self._device)
        padded = [self._padded(part, max(lengths)) for part in parts]
        with waiting(self.group, "scatter"):
            dist.scatter(mine, padded or None, group=self.group, group_src=0)
        return self._decode(mine, lengths[self.rank])

    def broadcast(self, value: Any) -> Any:
        """See :class:`World`."""
        mine = self._encode(value) if self.rank == 0 else self._encode(None)
        length = torch.tensor([mine.numel()], device=self._device)
        with waiting(self.group, "broadcast"):
            dist.broadcast(length, group=self.group, group_src=0)
            content = mine if self.rank == 0 else mine.new_empty(int(length))
            dist.broadcast(content, group=self.group, group_src=0)
        return self._decode(content, int(length))

    def _lengths(self, length: int) -> list[int]:
        lengths = [torch.empty(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        with waiting(self.group, "all_gather"):
            dist.all_gather(lengths, torch.tensor([length], device=self._device), group=self.group)
        return [int(each) for each in lengths]

    def _encode(self, value: Any) -> Tensor:
        text = bytearray(json.dumps(value, separators=(",", ":")).encode())
        return torch.frombuffer(text, dtype=torch.uint8).to(self._device)

    def _decode(self, content: Tensor, length: int) -> Any:
        return json.loads(content[:length].cpu().numpy().tobytes())

    def _padded(self, content: Tensor, length: int) -> Tensor:
        return torch.cat([content, content.new_zeros(length - content.numel())])


def current_world() -> World:
    """All ranks of the default process group, or this process alone when there is none."""
    return GroupWorld() if dist.is_available() and dist.is_initialized() else Alone()
