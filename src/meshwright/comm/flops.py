"""What is computed: matrix products and attention, by the conventions of ``ledger.ledger``.

Matrix products are counted as dispatched, attention by its kernels: forward when one runs, backward as
twice the forward it belongs to, found again by the log-sum-exp it saved. Where
``F.scaled_dot_product_attention`` writes itself out in plain products (no kernel fits), those count as
one attention all the same. Attention that a model writes out itself counts as its full products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.phase import current_phase, in_backward
from meshwright.ledger.ledger import Computes

_aten = torch.ops.aten
_FIRST_FACTOR: dict[Any, int] = {
    # operation: at which argument the two factors start
    _aten.mm: 0,
    _aten.bmm: 0,
    _aten.addmm: 1,
    _aten.addmm_: 1,
    _aten.baddbmm: 1,
    _aten.baddbmm_: 1,
    _aten.addbmm: 1,
}
_BATCHED = (_aten.bmm, _aten.baddbmm, _aten.baddbmm_, _aten.addbmm)
_KERNELS = (
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_fused_attention_overrideable,
)
_BACKWARD_KERNELS = (
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable_backward,
)
_MASK_NAMES = ("attn_mask", "attn_bias")
_PART_OF_ATTENTION = "meshwright.attention"


def product_flops(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """``[..., m, k] x [..., k, n]``: 2 m n k for each."""
    return 2 * prod(left) * right[-1]


def attention_flops(batch: int, heads: int, queries: int, keys: int, size: int, window: int | None = None) -> int:
    """Forward of causal attention: ``4 b h d pairs``; see ``ledger.ledger`` for ``pairs``.

    Args:
        batch: sequences.
        heads: query heads.
        queries: query positions s.
        keys: key positions; the same as ``queries`` in training.
        size: of a head, d.
        window: each token sees itself and the ``window - 1`` before it.
    """
    per_pair = 4 * batch * heads * size
    if window is None or window >= keys:
        return per_pair * queries * keys // 2
    return per_pair * keys * window - per_pair * window * window // 2


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Flops:
    """Sums of FLOPs by kind."""

    def __init__(self) -> None:
        self.forward = self.backward = self.recompute = 0
        self.inside_attention = False
        """``F.scaled_dot_product_attention`` is running."""
        self.kernel_ran = False
        """And has called a kernel."""
        self.window: int | None = None
        """The sliding window of the attention module that runs."""
        self._windows: dict[int, int | None] = {}
        """By mask: recomputation may call the attention without its module."""
        self._forwards: dict[int, int] = {}
        """FLOPs of a forward kernel by its log-sum-exp."""

    def restart(self) -> None:
        """Count from here; what forward passes were is kept for their backward passes."""
        self.forward = self.backward = self.recompute = 0

    def computes(self) -> Computes:
        """The sums."""
        return Computes(forward=self.forward, backward=self.backward, recompute=self.recompute)

    def _add(self, flops: int) -> None:
        phase = current_phase()
        if phase == "recompute":
            self.recompute += flops
        elif phase == "backward" or in_backward():
            self.backward += flops
        else:
            self.forward += flops

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count one operation that ran, if it is a matrix product or an attention kernel."""
        packet = func.overloadpacket
        start = _FIRST_FACTOR.get(packet)
        if start is not None:
            if packet not in _BATCHED or not self._is_attention():
                self._add(product_flops(tuple(args[start].shape), tuple(args[start + 1].shape)))
        elif packet in _KERNELS:
            self.kernel_ran = True
            flops = self.attention(args[0], args[1], _named(func, args, kwargs, _MASK_NAMES))
            if result[1].numel():
                self._forwards[_storage(result[1])] = flops
        elif packet in _BACKWARD_KERNELS:
            saved = _named(func, args, kwargs, ("logsumexp",))
            batch, heads, queries, size = args[1].shape
            whole = attention_flops(batch, heads, queries, args[2].shape[-2], size)
            self.attention_backward(whole if saved is None else self._forwards.get(_storage(saved), whole))

    def _is_attention(self) -> bool:
        if self.inside_attention:
            return True
        node = torch._C._current_autograd_node()
        return node is not None and _PART_OF_ATTENTION in _notes(node)

    def attention(self, query: Tensor, key: Tensor, mask: Tensor | None) -> int:
        """Count a forward ``[..., heads, queries, size]``; how many FLOPs it has."""
        window = None
        if mask is not None:
            if current_phase() != "recompute":
                self._windows[_storage(mask)] = self.window
            window = self._windows.get(_storage(mask), self.window)
        *batch, heads, queries, size = query.shape
        flops = attention_flops(prod(batch), heads, queries, key.shape[-2], size, window)
        self._add(flops)
        return flops

    def attention_backward(self, flops: int) -> None:
        """Count the backward of a forward that has ``flops``."""
        self.backward += 2 * flops
        self.recompute += flops // 2


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> Tensor | None:
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for name in names:
        if isinstance(value := values.get(name), Tensor):
            return value
    return None


@contextmanager
def attention_calls(flops: Flops) -> Iterator[None]:
    """While active, ``flops`` learns of every ``F.scaled_dot_product_attention`` that runs without a kernel.

    The function is replaced: a ``TorchFunctionMode`` would not see recomputation inside ``backward``.
    """
    original = F.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        query, key, value, mask = _attention_arguments(args, kwargs)
        flops.inside_attention, flops.kernel_ran = True, False
        count = 0
        try:
            output: Tensor = original(*args, **kwargs)
        finally:
            # Recomputation may break off inside, once it has all that backward needs.
            flops.inside_attention = False
            if not flops.kernel_ran:
                count = flops.attention(query, key, mask)
        if count and output.requires_grad:
            _mark(output, (query, key, value))
            output.register_hook(lambda _gradient: flops.attention_backward(count))  # type: ignore[no-untyped-call]
        return output

    F.scaled_dot_product_attention = counted
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _attention_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    names = ("query", "key", "value", "attn_mask")
    values = dict(zip(names, args, strict=False)) | kwargs
    return values["query"], values["key"], values["value"], values.get("attn_mask")


def _notes(node: Any) -> dict[str, Any]:
    notes: dict[str, Any] = node.metadata
    return notes


def _mark(output: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Mark the autograd nodes between ``inputs`` and ``output``."""
    ends = {tensor.grad_fn for tensor in inputs}
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in ends or _PART_OF_ATTENTION in _notes(node):
            continue
        _notes(node)[_PART_OF_ATTENTION] = True
        waiting.extend(parent for parent, _ in node.next_functions)


@contextmanager
def windows_of_modules(flops: Flops) -> Iterator[None]:
    """While active, a module with an attribute ``window`` says the sliding window of the attention inside it."""

    def entered(module: nn.Module, _inputs: Any) -> None:
        if hasattr(module, "window"):
            flops.window = module.window  # type: ignore[assignment]

    handle = nn.modules.module.register_module_forward_pre_hook(entered)
    try:
        yield
    finally:
        handle.remove()
