"""Tensor parallelism with sequence parallelism: every matrix is split over t ranks, and so are the tokens between them.

    norm, dropout, residual    column-split product       heads, activation     row-split product
    [tokens/t, hidden]   -->   all-gather over tokens -->  [tokens, out/t]  -->  reduce-scatter over tokens -->  ...

A column-split product ``Y_r = X W_r^T`` needs all tokens and yields this rank's outputs; a row-split product
``Y = sum_r X_r W_r^T`` yields a part of every output, whose sum each rank keeps for its own tokens (Shoeybi et al.
2019). Outside the products each rank works on ``tokens/t`` tokens, contiguous in the flattened ``[tokens, hidden]``
(Korthikanti et al. 2022), and a column-split product saves only those: backward gathers them again.

    per layer        forward                      backward
    column (x2)      all-gather X                 all-gather X, reduce-scatter dX
    row (x2)         reduce-scatter Y             all-gather dY

each of ``tokens * hidden`` elements, (t-1)/t of which a rank sends. They travel while matrix products run that do not
need them: a gather under the product of this rank's own tokens, a reduce-scatter under the product of the tokens this
rank keeps (the others' are computed first) and, in backward, under the weight gradient.

Schedules that take input and weight gradients apart gather dY of a row-split product once for either part.

The embedding and the output head are split by vocabulary rows; the loss never sees whole logits, only three numbers a
token from each rank: maximum, sum of exponentials, target's logit.

Parameters that are whole on every rank (norms, row biases, learned positions) get each rank's part of the gradient;
``reduce_replicated_gradients`` adds the parts once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import Handle, all_gather, all_reduce, own_piece_is_read_late, reduce_scatter
from meshwright.comm.mesh import Mesh
from meshwright.comm.phase import phase
from meshwright.model.backward_part import wants
from meshwright.model.cross_entropy import cross_entropy_sum
from meshwright.model.partition import Partition
from meshwright.parallel.owned import Owned


class TensorPartition(Partition):
    """The ranks of ``mesh``'s axis ``tp``. ``tokens`` must be a multiple of their number.

    Every rank of the axis must call the same methods in the same order, also in backward.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.degree = mesh.degree("tp")
        self.index = mesh.coordinate("tp")
        self.group = mesh.group("tp")

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[tokens/t, in] -> [tokens, out/t]``: ``weight`` ``[out/t, in]``, ``bias`` ``[out/t]``."""
        result: Tensor = _Column.apply(x, weight, bias, self.group)  # type: ignore[no-untyped-call]
        return result

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[tokens, in/t] -> [tokens/t, out]``: ``weight`` ``[out, in/t]``; the whole ``bias`` is added once."""
        x = _Keep.apply(x, weight.detach())  # type: ignore[no-untyped-call]
        result: Tensor = _Row.apply(x, weight, bias, self.group, x.grad_fn)  # type: ignore[no-untyped-call]
        return result

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """``[tokens] -> [tokens/t, hidden]``: ``weight`` holds this rank's vocabulary rows."""
        result: Tensor = _Embed.apply(ids, weight, self.group)  # type: ignore[no-untyped-call]
        return result

    def loss(self, x: Tensor, weight: Tensor, labels: Tensor, divisor: float | Tensor) -> Tensor:
        """Sum of cross entropy over counted labels, divided by ``divisor``; the same scalar on every rank."""
        return cross_entropy_sum(
            self.column(x, weight, None),
            labels,
            divisor,
            vocabulary=self.vocabulary,
            chunk_elements=self.loss_chunk,
            first_row=self.index * weight.shape[0],
            reduce_max=lambda value: self._reduced(value, "max"),
            reduce_sum=lambda value: self._reduced(value, "sum"),
        )

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """``[tokens/t, hidden] -> [tokens, vocabulary]`` whole on every rank, at least float32; not differentiable."""
        with torch.no_grad():
            mine = self.column(x, weight, None)
            tokens, rows = mine.shape
            parts = mine.new_empty((self.degree, tokens, rows))
            all_gather(parts, mine, self.group)
            whole = parts.transpose(0, 1).reshape(tokens, self.degree * rows)[:, : self.vocabulary]
        return whole if whole.element_size() >= 4 else whole.float()

    def my_tokens(self, x: Tensor) -> Tensor:
        """This rank's contiguous chunk ``[tokens/t, ...]`` of ``[tokens, ...]``."""
        size = x.shape[0] // self.degree
        return x[self.index * size : (self.index + 1) * size]

    def _reduced(self, value: Tensor, operation: str) -> Tensor:
        all_reduce(value, self.group, op=operation)
        return value


def reduce_replicated_gradients(owned: Sequence[Owned], mesh: Mesh) -> None:
    """Sum over ``tp`` the gradients of parameters that stand whole on every tp rank; the same bits on all of them.

    One rank-ordered all-reduce of all of them together. Call it on every rank after ``finish_gradients``: the
    tp ranks of one dp rank own the same ranges.
    """
    gradients = [piece.gradient for piece in owned if piece.tp_replicated]
    if mesh.degree("tp") == 1 or not gradients:
        return
    with phase("reduce"):
        flat = torch.cat(gradients)
        all_reduce(flat, mesh.group("tp"), ordered=True)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part)


# -- products that overlap with their communication ---------------------------------------------------


def _own_rows(x: Tensor, group: dist.ProcessGroup) -> slice:
    size = x.shape[0] // group.size()
    return slice(group.rank() * size, (group.rank() + 1) * size)


def _other_rows(x: Tensor, group: dist.ProcessGroup) -> list[slice]:
    own = _own_rows(x, group)
    return [part for part in (slice(0, own.start), slice(own.stop, x.shape[0])) if part.stop > part.start]


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, matrix, out=out)
    else:
        torch.addmm(bias, x, matrix, out=out)


def _start_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Handle]:
    """All ranks' ``[tokens/t, ...]`` as ``[tokens, ...]``, complete after the handle's ``wait``."""
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    handle = all_gather(gathered, x.contiguous(), group, asynchronous=True)
    assert handle is not None
    return gathered, handle


def _gather_and_multiply(
    x: Tensor, matrix: Tensor, bias: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """``gather(x) @ matrix + bias`` and ``gather(x)``; this rank's rows are multiplied while the others' arrive."""
    gathered, arrival = _start_gather(x, group)
    product = x.new_empty((gathered.shape[0], matrix.shape[1]))
    _multiply(x, matrix, bias, product[_own_rows(product, group)])
    arrival.wait()
    for rows in _other_rows(product, group):
        _multiply(gathered[rows], matrix, bias, product[rows])
    return product, gathered


def _start_multiply_and_scatter(x: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Handle]:
    """``reduce_scatter(x @ matrix)``, complete after the handle's ``wait``; the rows kept here are multiplied last."""
    product = x.new_empty((x.shape[0], matrix.shape[1]))
    kept = x.new_empty((x.shape[0] // group.size(), matrix.shape[1]))
    late = group.size() > 1 and own_piece_is_read_late(product)
    for rows in _other_rows(product, group) if late else (slice(None),):
        _multiply(x[rows], matrix, None, product[rows])
    handle = reduce_scatter(kept, product, group, asynchronous=True)
    assert handle is not None
    if late:
        own = _own_rows(product, group)
        _multiply(x[own], matrix, None, product[own])
    return kept, handle


# -- autograd -----------------------------------------------------------------------------------------


class _Column(torch.autograd.Function):
    """``Y_r = gather(X) W_r^T + b_r``; saves this rank's tokens alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return _gather_and_multiply(x, weight.t(), bias, group)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        grad_x = grad_weight = grad_bias = gathered = arrival = departure = None
        if ctx.needs_input_grad[1] and wants.weights:
            gathered, arrival = _start_gather(x, ctx.group)
        if ctx.needs_input_grad[0] and wants.inputs:
            grad_x, departure = _start_multiply_and_scatter(gradient, weight, ctx.group)
        if ctx.needs_input_grad[2] and wants.weights:
            grad_bias = gradient.sum(0)
        if gathered is not None and arrival is not None:
            arrival.wait()
            grad_weight = gradient.t() @ gathered
        if departure is not None:
            departure.wait()
        return grad_x, grad_weight, grad_bias, None


class _Keep(torch.autograd.Function):
    """Saves what ``_Row`` needs in backward, before it runs: autograd saves what a function asks for after it.

    A recomputed layer ends with a row-split product whose result nobody needs, and recomputation stops as soon as
    everything is saved. So neither the product nor its exchange runs again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Row(torch.autograd.Function):
    """``Y = scatter(sum_r X_r W_r^T) + b``; ``keep`` is the node that saved X and W, None if X needs no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, keep: Any
    ) -> Tensor:
        if keep is None:
            ctx.save_for_backward(x, weight)
        ctx.group, ctx.keep = group, keep
        kept, departure = _start_multiply_and_scatter(x, weight.t(), group)
        departure.wait()
        return kept if bias is None else kept.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = (ctx if ctx.keep is None else ctx.keep).saved_tensors
        mine = gradients[0]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0] and wants.inputs:
            grad_x, gradient = _gather_and_multiply(mine, weight, None, ctx.group)
        else:
            gradient, arrival = _start_gather(mine, ctx.group)
            arrival.wait()
        if ctx.needs_input_grad[1] and wants.weights:
            grad_weight = gradient.t() @ x
        if ctx.needs_input_grad[2] and wants.weights:
            grad_bias = mine.sum(0)
        return grad_x, grad_weight, grad_bias, None, None


class _Embed(torch.autograd.Function):
    """Rows of the vocabulary that other ranks hold count as zero here; exactly one rank adds each token's row."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        rows = ids - group.rank() * weight.shape[0]
        absent = (rows < 0) | (rows >= weight.shape[0])
        found = torch.nn.functional.embedding(rows.masked_fill(absent, 0), weight).masked_fill_(absent[:, None], 0)
        ctx.save_for_backward(rows.masked_fill_(absent, _ABSENT))
        ctx.group, ctx.rows = group, weight.shape[0]
        kept = found.new_empty((ids.shape[0] // group.size(), weight.shape[1]))
        reduce_scatter(kept, found, group)
        return kept

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not (ctx.needs_input_grad[1] and wants.weights):
            return None, None, None
        (rows,) = ctx.saved_tensors
        gradient, arrival = _start_gather(gradients[0], ctx.group)
        arrival.wait()
        # Adds token by token, in order; a frequent token's sum in 16 bits would lose most of its terms.
        wide = gradient if gradient.element_size() >= 4 else gradient.float()
        total = torch.ops.aten.embedding_dense_backward(wide, rows, ctx.rows, _ABSENT, False)
        return None, total.to(gradient.dtype), None


_ABSENT = -1
"""Stands for a vocabulary row of another rank: the backward kernel skips it as its padding index."""
