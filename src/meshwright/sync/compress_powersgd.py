"""PowerSGD: a matrix of gradients as the product of two thin ones, by one step of power iteration.

Vogels et al., "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS 2019,
algorithms 1 and 2. Rank i of N holds the matrix M_i (a x b) of its gradients and of what it has not sent yet:

    P = sum_i M_i Q            P <- an orthonormal basis of its columns            all-reduce of a r numbers
    Q_i = M_i^T P              Q = sum_i Q_i                                       all-reduce of b r numbers
    the sum is P Q^T           M_i keeps M_i - P Q_i^T                             Q is where the next step starts

so ``sum over steps of P Q^T + sum_i residual_i = sum of all gradients``; and the sum is exact when r is at least the
rank of sum_i M_i. A matrix travels this way if that saves at least ``least_saving`` times its bytes
(``(a + b) r least_saving <= a b``); the others, and vectors, travel as they are, with the Ps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import all_reduce
from meshwright.comm.copies import Span
from meshwright.comm.operations import Operations, started
from meshwright.sync.memory import Memories
from meshwright.sync.two_stage import key_of


@dataclass(frozen=True)
class Matrix:
    """A matrix in a buffer."""

    start: int
    rows: int
    columns: int
    rank: int
    """Columns of P and Q."""

    @property
    def stop(self) -> int:
        """Behind its last element."""
        return self.start + self.rows * self.columns

    def of(self, values: Tensor) -> Tensor:
        """``[rows, columns]``, a view of the buffer."""
        return values[self.start : self.stop].view(self.rows, self.columns)


def saves(rows: int, columns: int, rank: int, least_saving: float) -> bool:
    """Whether a matrix travels as P and Q."""
    used = min(rank, rows, columns)
    return (rows + columns) * used * least_saving <= rows * columns


@dataclass(frozen=True)
class Plan:
    """What of a buffer travels how."""

    matrices: tuple[Matrix, ...]
    dense: tuple[tuple[int, int], ...]
    """(start, stop) of what travels as it is; padding with it."""

    @property
    def second_count(self) -> int:
        """Numbers of the second: every Q."""
        return sum(matrix.columns * matrix.rank for matrix in self.matrices)


def plan_of(size: int, spans: Sequence[Span], rank: int, least_saving: float) -> Plan:
    """Cut a buffer of ``size`` elements into matrices and the rest."""
    matrices = [
        Matrix(span.start, span.shape[0], span.shape[1], min(rank, *span.shape))
        for span in sorted(spans, key=lambda span: span.start)
        if len(span.shape) == 2 and saves(*span.shape, rank, least_saving)
    ]
    dense, at = [], 0
    for matrix in matrices:
        if at < matrix.start:
            dense.append((at, matrix.start))
        at = matrix.stop
    if at < size:
        dense.append((at, size))
    return Plan(tuple(matrices), tuple(dense))


class PowerSgd:
    """Sums buffers over a group by low-rank products.

    Args:
        memories: where residuals and bases are kept.
        rank: columns of P and Q.
        least_saving: see the module; 0: every matrix.
        seed: of the first bases.
    """

    def __init__(self, memories: Memories, *, rank: int, least_saving: float = 1.0, seed: int = 0) -> None:
        self.memories, self.rank, self.least_saving, self.seed = memories, rank, least_saving, seed
        self._plans: dict[tuple[str, str], Plan] = {}

    def begin(self, step: int) -> None:
        """A step starts; nothing depends on its number."""

    def prepare(
        self, name: str, level: str, start: int, like: Tensor, group: dist.ProcessGroup, spans: Sequence[Span]
    ) -> None:
        """See ``TwoStage.prepare``; bases start from normal numbers, the same on every rank."""
        inside = [
            Span(span.name, span.start - start, span.shape)
            for span in spans
            if span.start >= start and span.start + math.prod(span.shape) <= start + like.numel()
        ]
        plan = self._plans[name, level] = plan_of(like.numel(), inside, self.rank, self.least_saving)
        self.memories.make(name, level, "residual", start, like)
        basis = self.memories.make(name, level, "basis", 0, like.new_zeros(plan.second_count))
        generator = torch.Generator().manual_seed(key_of(self.seed, name, level) % 2**63)
        if like.device.type != "meta":
            drawn = torch.randn(plan.second_count, dtype=torch.float64, generator=generator)
            basis.kept.copy_(drawn)

    def scatter(self, name: str, level: str, output: Tensor, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """Sum ``values`` (``[P * n]``, used up) over the group; this rank's row into ``output`` (``[n]``)."""
        yield from self.sum(name, level, values, group)
        output.copy_(values.view(group.size(), -1)[group.rank()])

    def sum(self, name: str, level: str, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """Sum ``values`` over the group in place, the same bits on every rank."""
        plan, residual = self._plans[name, level], self.memories.get(name, level, "residual")
        values.add_(residual.now)
        basis = self.memories.get(name, level, "basis").update()
        right = torch.split(basis, [matrix.columns * matrix.rank for matrix in plan.matrices])
        bases = [part.view(matrix.columns, matrix.rank) for part, matrix in zip(right, plan.matrices, strict=True)]
        for base in bases:
            # The same space; but of the product with the last step's Q, small directions would be lost to rounding.
            base.copy_(torch.linalg.qr(base).Q)
        first = torch.cat(
            [(matrix.of(values) @ base).view(-1) for matrix, base in zip(plan.matrices, bases, strict=True)]
            + [values[low:high] for low, high in plan.dense]
        )
        yield started(all_reduce(first, group, ordered=True, asynchronous=True))
        sizes = [matrix.rows * matrix.rank for matrix in plan.matrices] + [high - low for low, high in plan.dense]
        parts = torch.split(first, sizes)
        # Every rank computes the bases from the same bits, so all get the same.
        left = [
            torch.linalg.qr(part.view(matrix.rows, matrix.rank)).Q
            for part, matrix in zip(parts, plan.matrices, strict=False)
        ]
        sent = torch.zeros_like(values)
        for matrix, base, column in zip(plan.matrices, bases, left, strict=True):
            torch.mm(matrix.of(values).t(), column, out=base)
            torch.mm(column, base.t(), out=matrix.of(sent))
        for low, high in plan.dense:
            sent[low:high] = values[low:high]
        residual.difference(values, sent)
        if plan.matrices:
            yield started(all_reduce(basis, group, ordered=True, asynchronous=True))
        for matrix, base, column in zip(plan.matrices, bases, left, strict=True):
            torch.mm(column, base.t(), out=matrix.of(values))
        for (low, high), part in zip(plan.dense, parts[len(plan.matrices) :], strict=True):
            values[low:high] = part
