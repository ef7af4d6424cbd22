"""Cross entropy summed over counted tokens, with one ``[tokens, vocabulary]`` buffer in all.

Forward overwrites the logits with the softmax over the columns that are here; backward scales the same buffer
into the gradient. Vocabulary-parallel loss passes the two reductions over the ranks (Shoeybi et al. 2019: the
maximum, then the sum of exponentials together with the target's logit).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.model.micro_batch import IGNORE

CHUNK_ELEMENTS = 1 << 18
"""Elements worked on at a time on a CPU: 1 MiB of float32, so that the passes of a chunk meet in the cache."""
DEVICE_CHUNK_ELEMENTS = 1 << 25
"""On a CUDA device: 128 MiB of float32, enough to fill it, little beside the logits of a large vocabulary."""


def cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    divisor: float | Tensor,
    *,
    vocabulary: int | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    first_row: int = 0,
    reduce_max: Callable[[Tensor], Tensor] | None = None,
    reduce_sum: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Sum over counted labels of ``-log softmax(logits)[label]``, divided by ``divisor``.

    Args:
        logits: ``[tokens, columns]``; **overwritten**. Columns from ``vocabulary - first_row`` on are padding.
        labels: ``[tokens]`` token ids or ``IGNORE``.
        divisor: the number of counted labels in the global batch.
        vocabulary: tokens in the vocabulary; None when no column is padding.
        chunk_elements: logits worked on at a time; 16-bit ones have a float32 copy meanwhile.
        first_row: vocabulary number of column 0.
        reduce_max: maximum over the ranks that hold the other columns; None for one rank.
        reduce_sum: the sum over the same ranks.

    Returns:
        A scalar, float32 (float64 for float64 logits), the same on every rank.
    """
    columns = logits.shape[1] if vocabulary is None else max(0, min(logits.shape[1], vocabulary - first_row))
    result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, divisor, columns, chunk_elements, first_row, reduce_max, reduce_sum
    )
    return result


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        divisor: float | Tensor,
        columns: int,
        chunk_elements: int,
        first_row: int,
        reduce_max: Callable[[Tensor], Tensor] | None,
        reduce_sum: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        counted = labels != IGNORE
        target = labels - first_row
        mine = counted & (target >= 0) & (target < columns)
        target = torch.where(mine, target, 0)
        work = logits.dtype if logits.dtype == torch.float64 else torch.float32
        target_logit = logits.gather(1, target[:, None]).squeeze(1).to(work)
        mine_largest, mine_sum = _softmax_(logits, columns, work, chunk_elements)
        largest = mine_largest if reduce_max is None else reduce_max(mine_largest.clone())
        mine_sum *= (mine_largest - largest).exp_()
        sums = torch.stack((mine_sum, torch.where(mine, target_logit - largest, 0.0)))
        if reduce_sum is not None:
            sums = reduce_sum(sums)
        ctx.save_for_backward(logits, target, mine, counted, sums, mine_sum)
        ctx.divisor, ctx.chunk_elements = divisor, chunk_elements
        ctx.spent = False
        return torch.where(counted, sums[0].log() - sums[1], 0.0).sum() / divisor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.spent:
            raise RuntimeError("the loss's buffer holds its gradient already: backward ran twice")
        ctx.spent = True
        buffer, target, mine, counted, sums, mine_sum = ctx.saved_tensors
        total, target_logit = sums.unbind()
        per_token = torch.where(counted, gradients[0] / ctx.divisor, 0.0).to(total.dtype)
        scale = (per_token * (mine_sum / total))[:, None]
        for rows in _chunks(buffer, ctx.chunk_elements):
            if buffer.dtype == scale.dtype:
                buffer[rows].mul_(scale[rows])
            else:
                buffer[rows] = buffer[rows].to(scale.dtype).mul_(scale[rows])
        # (p - 1) from the float32 logit: subtracting 1 from a bfloat16 p would leave nothing of a confident token
        at_target = ((target_logit.exp() / total - 1.0) * per_token).to(buffer.dtype)
        place = (torch.arange(buffer.shape[0], device=buffer.device), target)
        buffer[place] = torch.where(mine, at_target, buffer[place])
        return buffer, None, None, None, None, None, None, None


def _softmax_(logits: Tensor, columns: int, work: torch.dtype, chunk_elements: int) -> tuple[Tensor, Tensor]:
    """Softmax over the first ``columns`` in place, zero in the others; the row maxima and sums of exponentials."""
    tokens = logits.shape[0]
    if columns == 0:
        logits.zero_()
        nothing = torch.zeros(tokens, dtype=work, device=logits.device)
        return torch.full_like(nothing, float("-inf")), nothing
    if columns < logits.shape[1]:
        logits[:, columns:] = float("-inf")
    largest = torch.empty(tokens, dtype=work, device=logits.device)
    sums = torch.empty_like(largest)
    for rows in _chunks(logits, chunk_elements):
        chunk = logits[rows] if logits.dtype == work else logits[rows].to(work)
        torch.amax(chunk, 1, out=largest[rows])
        torch.softmax(chunk, 1, out=chunk)
        # the largest probability is exp(0) / sum: cheaper than a second pass of exponentials
        torch.reciprocal(torch.amax(chunk, 1), out=sums[rows])
        if logits.dtype != work:
            logits[rows] = chunk
    return largest, sums


def _chunks(logits: Tensor, elements: int) -> Iterator[slice]:
    tokens, columns = logits.shape
    step = max(1, elements // max(1, columns))
    # Of a fake tensor two chunks suffice: further ones would only repeat the same operations.
    for start in range(0, min(tokens, 2 * step) if isinstance(logits, FakeTensor) else tokens, step):
        yield slice(start, start + step)
