"""The MLP's nonlinearities, from the fused ``gate_up`` product to the input of ``down``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.job.model_spec import ModelSpec


def activate(spec: ModelSpec, x: Tensor) -> Tensor:
    """``[tokens, ffn]`` (``[tokens, 2 ffn]``, gate then up, if gated) ``-> [tokens, ffn]``."""
    if not spec.gated:
        return _plain(spec.activation, x)
    if spec.activation == "silu" and not torch.compiler.is_compiling():
        result: Tensor = _SwiGlu.apply(x)  # type: ignore[no-untyped-call]
        return result
    gate, up = x.chunk(2, dim=1)
    return _plain(spec.activation, gate) * up


def _plain(kind: str, x: Tensor) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


class _SwiGlu(torch.autograd.Function):
    """``silu(gate) * up`` (Shazeer 2020). Saves only its input and writes one fused gradient."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=1)
        gradient = gradients[0]
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, dim=1)
        torch.mul(F.silu(gate), gradient, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=grad_gate)
        return result
