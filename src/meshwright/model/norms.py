"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm over the last axis of ``[tokens, hidden]``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.backward_part import wants


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias; statistics in float32 (float64 for float64 input).

    Args:
        size: extent of the last axis.
        kind: "rmsnorm" or "layernorm".
        eps: added to the mean square or the variance.
    """

    def __init__(self, size: int, kind: str, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size] -> [..., size]``."""
        if self.bias is not None:
            return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last axis; saves ``x`` and one number a row."""
    if torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    result: Tensor = _RmsNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps)  # type: ignore[no-untyped-call]
    return result.view_as(x)


class _RmsNorm(torch.autograd.Function):
    """By hand: one saved activation, and each sum over rows or columns is one matrix-vector product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        norm = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        scale = norm.square_().div_(x.shape[1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        result: Tensor = (wide * scale).mul_(weight).to(x.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, scale = ctx.saved_tensors
        gradient = gradients[0].to(scale.dtype)
        wide, wide_weight = x.to(scale.dtype), weight.to(scale.dtype)
        product = gradient * wide
        grad_weight = None
        if ctx.needs_input_grad[1] and wants.weights:
            grad_weight = torch.mv(product.t(), scale.squeeze(1)).to(weight.dtype)
        if not (ctx.needs_input_grad[0] and wants.inputs):
            return None, grad_weight, None
        inner = torch.mv(product, wide_weight)[:, None].mul_(scale.pow(3)).div_(x.shape[1])
        grad_x = torch.mul(gradient, wide_weight, out=product).mul_(scale).addcmul_(wide, inner, value=-1)
        return grad_x.to(x.dtype), grad_weight, None
