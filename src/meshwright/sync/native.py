"""All-reduces that are not schedules: the backend's own, and the direct exchange of ``comm.collectives``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import Handle, all_reduce, reduce_scatter
from meshwright.comm.operations import Operations

_NATIVE = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Backend:
    """What the transport library offers: Gloo's ring, NCCL's choice. Gloo's minimum and maximum may lose a NaN."""

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Operations:
        """See ``all_reduce.Algorithm.all_reduce``."""
        if group.size() > 1 and tensor.numel():
            work = dist.all_reduce(tensor.detach(), op=_NATIVE[op], group=group, async_op=True)
            yield Handle(group, "all_reduce", [work])

    def reduce_scatter(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> Operations:
        """See ``all_reduce.Algorithm.reduce_scatter``."""
        if group.size() == 1:
            output.copy_(input)
            return
        operation: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        arrived = torch.empty_like(output)
        yield Handle(group, "reduce_scatter", [operation(arrived, input.detach(), group=group, async_op=True)])
        output.copy_(arrived)


class Direct:
    """Everybody to everybody: the collectives of ``comm``, which choose by size and by whether memory is shared."""

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Operations:
        """See ``all_reduce.Algorithm.all_reduce``."""
        if (handle := all_reduce(tensor, group, op=op, asynchronous=True)) is not None:
            yield handle

    def reduce_scatter(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> Operations:
        """See ``all_reduce.Algorithm.reduce_scatter``."""
        if (handle := reduce_scatter(output, input, group, asynchronous=True)) is not None:
            yield handle
