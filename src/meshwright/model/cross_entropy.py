"""Cross entropy summed over counted tokens, with one ``[tokens, vocabulary]`` buffer in all.

Forward overwrites the logits with ``exp(logit - row maximum)``; backward scales the same buffer into
the gradient. Vocabulary-parallel loss passes the two reductions over the ranks (Shoeybi et al. 2019:
the maximum, then the sum of exponentials together with the target's logit).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.model.micro_batch import IGNORE

_CHUNK_ELEMENTS = 1 << 18
"""Elements worked on at a time: 1 MiB of float32, so that the passes of a chunk meet in the cache."""


def cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    divisor: float | Tensor,
    *,
    vocabulary: int | None = None,
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
        first_row: vocabulary number of column 0.
        reduce_max: maximum over the ranks that hold the other columns; None for one rank.
        reduce_sum: the sum over the same ranks.

    Returns:
        A scalar, float32 (float64 for float64 logits), the same on every rank.
    """
    columns = logits.shape[1] if vocabulary is None else max(0, min(logits.shape[1], vocabulary - first_row))
    result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, divisor, columns, first_row, reduce_max, reduce_sum
    )
    return result


def _chunks(logits: Tensor) -> range:
    step = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return range(0, logits.shape[0], step if logits.device.type == "cpu" else max(1, logits.shape[0]))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        divisor: float | Tensor,
        columns: int,
        first_row: int,
        reduce_max: Callable[[Tensor], Tensor] | None,
        reduce_sum: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        work = logits.dtype if logits.dtype == torch.float64 else torch.float32
        tokens = logits.shape[0]
        counted = labels != IGNORE
        target = labels - first_row
        mine = counted & (target >= 0) & (target < columns)
        target = torch.where(mine, target, 0)
        if columns < logits.shape[1]:
            logits[:, columns:] = float("-inf")
        largest = logits.amax(1).to(work) if columns else logits.new_full((tokens,), float("-inf"), dtype=work)
        if reduce_max is not None:
            largest = reduce_max(largest)
        target_logit = logits.gather(1, target[:, None]).squeeze(1).to(work)
        sums = torch.empty(2, tokens, dtype=work, device=logits.device)
        sums[1] = torch.where(mine, target_logit - largest, 0.0)
        step = _chunks(logits).step
        for start in _chunks(logits):
            chunk = logits[start : start + step]
            shift = largest[start : start + step, None]
            if chunk.dtype == work:
                chunk.sub_(shift).exp_()
                torch.sum(chunk, 1, out=sums[0, start : start + step])
            else:
                wide = torch.sub(chunk, shift).exp_()
                torch.sum(wide, 1, out=sums[0, start : start + step])
                chunk.copy_(wide)
        if reduce_sum is not None:
            sums = reduce_sum(sums)
        losses = torch.where(counted, sums[0].log() - sums[1], 0.0)
        ctx.save_for_backward(logits, target, mine, counted, sums)
        ctx.divisor = divisor
        ctx.spent = False
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.spent:
            raise RuntimeError("the loss's buffer holds its gradient already: backward ran twice")
        ctx.spent = True
        exponentials, target, mine, counted, sums = ctx.saved_tensors
        total, target_logit = sums.unbind()
        per_token = torch.where(counted, gradients[0] / ctx.divisor, 0.0).to(total.dtype)
        scale = per_token / total
        step = _chunks(exponentials).step
        for start in _chunks(exponentials):
            chunk = exponentials[start : start + step]
            chunk_scale = scale[start : start + step, None]
            if chunk.dtype == scale.dtype:
                chunk.mul_(chunk_scale)
            else:
                chunk.copy_(torch.mul(chunk, chunk_scale))
        # (p - 1) from the float32 logit: subtracting 1 from a bfloat16 p would leave nothing of a confident token
        at_target = (target_logit.exp() / total - 1.0) * per_token
        others = exponentials.gather(1, target[:, None])
        exponentials.scatter_(
            1, target[:, None], torch.where(mine[:, None], at_target[:, None].to(others.dtype), others)
        )
        return exponentials, None, None, None, None, None, None
