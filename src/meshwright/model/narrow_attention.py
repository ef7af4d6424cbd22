"""Causal attention in bfloat16 and float16 on CPU, with its backward in float32.

PyTorch's CPU flash kernel takes 1.5 times as long backward in 16 bits as in float32; widening what forward saved
costs a tenth of that, and the sums are then float32 too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def narrow_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As ``scaled_dot_product_attention`` with grouped heads, on CPU.

    Args:
        q: ``[batch, heads, sequence, size]``.
        k: ``[batch, kv_heads, sequence, size]``.
        v: the same.
        mask: additive, broadcastable to ``[batch, heads, sequence, sequence]``; None: causal.
    """
    result: Tensor = _NarrowAttention.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
    return result


class _NarrowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out, logsumexp = _forward(q, k, v, 0.0, mask is None, attn_mask=mask)
        ctx.save_for_backward(q, k, v, mask, out, logsumexp)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, mask, out, logsumexp = ctx.saved_tensors
        wide_mask = None if mask is None else mask.float()
        found = _backward(
            gradients[0].float(), q.float(), k.float(), v.float(), out.float(), logsumexp,
            0.0, mask is None, attn_mask=wide_mask,
        )  # fmt: skip
        return *(gradient.to(q.dtype) for gradient in found), None
