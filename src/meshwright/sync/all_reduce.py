"""All-reduce as a contract, apart from the algorithm that keeps it.

Afterwards every rank holds, of each element over all ranks, the sum, the minimum, the maximum (of floats: NaN, if one
is), or the average with weights that all ranks know, ``sum of w_r x_r / sum of w_r``; and every rank the same bits.
Sums and averages of 16-bit floats are rounded at every hop; of integers below 2^24 (2^53) in float32 (float64), they
are exact in every algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.operations import Operations
from meshwright.errors import InputError
from meshwright.sync.native import Backend, Direct
from meshwright.sync.run import DEFAULT_CHUNK_BYTES, Scheduled
from meshwright.sync.schedules import SCHEDULED, make_schedule

ALGORITHMS = ("direct", "backend", *SCHEDULED)
OPERATIONS = ("sum", "min", "max", "average")


class Algorithm(Protocol):
    """One way to keep the contract; its methods start operations and yield each that must end before going on."""

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Operations:
        """Reduce contiguous ``tensor`` in place; ``op``: sum, min or max."""

    def reduce_scatter(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> Operations:
        """Sum ``input`` (``[ranks * row]``, contiguous, which may be overwritten); this rank's row into ``output``.

        ``output`` may be this rank's row of ``input``.
        """


def make_algorithm(
    name: str, nodes: Sequence[int] | None = None, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> Algorithm:
    """The algorithm of that name.

    Args:
        name: one of ``ALGORITHMS``.
        nodes: the node of each rank of the group, for ``hierarchical`` and ``leaders``; required there.
        chunk_bytes: longer all-reduces are cut into chunks of so many bytes, whose messages and additions overlap.

    Raises:
        InputError: there is no such algorithm, or it needs ``nodes``.
    """
    if name == "direct":
        return Direct()
    if name == "backend":
        return Backend()
    if name not in ALGORITHMS:
        raise InputError(f"algorithm: {name!r} is not an all-reduce; use one of {', '.join(ALGORITHMS)}")
    return Scheduled(make_schedule(name, nodes), chunk_bytes)


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    algorithm: Algorithm,
    *,
    op: str = "sum",
    weights: Sequence[float] | None = None,
) -> None:
    """Reduce contiguous ``tensor`` over the group in place, and return when it is done.

    Args:
        tensor: floats for an average.
        group: its P ranks; every one calls it with the same arguments.
        algorithm: see ``make_algorithm``.
        op: one of ``OPERATIONS``.
        weights: of an average, one a rank, none negative and not all zero; absent: equal ones.

    Raises:
        InputError: there is no such operation, or the weights do not fit.
    """
    if op not in OPERATIONS:
        raise InputError(f"op: {op!r} is not a reduction; use {', '.join(OPERATIONS[:-1])} or {OPERATIONS[-1]}")
    total = _total_weight(op, weights, group.size())
    if weights is not None:
        tensor.mul_(weights[group.rank()])
    for handle in algorithm.all_reduce(tensor, group, "sum" if op == "average" else op):
        handle.wait()
    if op == "average":
        tensor.div_(total)


def _total_weight(op: str, weights: Sequence[float] | None, ranks: int) -> float:
    if weights is None:
        return float(ranks)
    if op != "average":
        raise InputError(f"weights: {list(weights)} are for op=average, not {op}; leave them out")
    if len(weights) != ranks or min(weights) < 0 or not sum(weights) > 0:
        raise InputError(f"weights: {list(weights)} must be one a rank ({ranks}), none negative and not all zero")
    return float(sum(weights))
