"""Replicas that train apart and meet now and then: the parts that every such strategy needs.

Between meetings no gradient passes between replicas. A meeting sums something over them in rank order, so that every
replica (and every copy of a parameter inside a replica) holds the same bits afterwards. Replicas count by the valid
tokens they trained on since they last met, ``w_r = n_r / sum n``; one that had none counts for nothing. Every member
takes part in every meeting: it waits for one that is late; without one that is gone there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import all_reduce
from meshwright.comm.operations import Operations, started


class Flat:
    """Tensors of one type seen as one flat buffer, padded to a multiple of ``degree`` elements."""

    def __init__(self, tensors: Sequence[Tensor], degree: int) -> None:
        self.tensors = list(tensors)
        self.sizes = [tensor.numel() for tensor in self.tensors]
        self.count = sum(self.sizes)
        self.padding = -self.count % degree

    def gather(self) -> Tensor:
        """A copy, ``[count + padding]``."""
        parts = [tensor.detach().reshape(-1) for tensor in self.tensors]
        if not parts:
            return torch.empty(0)
        return torch.cat([*parts, parts[0].new_zeros(self.padding)])

    def put(self, flat: Tensor) -> None:
        """Write a buffer back into the tensors."""
        for tensor, part in zip(self.tensors, self.parts(flat), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The views of a buffer that stand for the tensors."""
        return list(torch.split(flat[: self.count], self.sizes)) if self.sizes else []


class Exchange:
    """A sum on its way: started now, finished now or some steps later."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._handle = next(operations, None)

    def finish(self) -> None:
        """Return when the sum is done."""
        while self._handle is not None:
            self._handle.wait()
            self._handle = next(self._operations, None)


def plain_sum(values: Tensor, group: dist.ProcessGroup) -> Operations:
    """Sum ``values`` over the group in place, in rank order."""
    yield started(all_reduce(values, group, ordered=True, asynchronous=True))


def weight_of(tokens: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """This replica's weight among the group: its share of the tokens; equal shares where nobody had any."""
    total = torch.tensor([tokens], dtype=torch.int64, device=device)
    all_reduce(total, group)
    return tokens / int(total.item()) if int(total.item()) else 1.0 / group.size()
