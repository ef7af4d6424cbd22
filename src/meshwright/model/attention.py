"""Causal self-attention over packed documents: masks, rotation, and the scaled dot product."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job.model_spec import ModelSpec
from meshwright.model.dropout import Randomness, dropped
from meshwright.model.micro_batch import MicroBatch
from meshwright.model.narrow_attention import narrow_attention
from meshwright.model.norms import Norm
from meshwright.model.partition import Partition
from meshwright.model.rotary import rotary_tables


@dataclass
class LayerContext:
    """What the layers share during one forward of one micro-batch."""

    batch: int
    sequence: int
    rotary: tuple[Tensor, Tensor] | None
    """Cosine and sine, ``[batch, sequence, 1, head_size / 2]``, at least float32."""
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    """By window: additive ``[batch or 1, 1, sequence, sequence]``; None: plain causal."""
    randomness: Randomness | None = None
    """None: no dropout."""
    examples: Tensor | None = None
    """``[batch]``."""


def visible(batch: MicroBatch, window: int | None) -> Tensor | None:
    """Which earlier tokens each token sees: bool ``[batch or 1, sequence, sequence]``, or None for all of them.

    Every token sees itself, padding included, so no row is ever empty.
    """
    sequence = batch.tokens.shape[1]
    windowed = window is not None and window < sequence
    if batch.documents is None and not windowed:
        return None
    index = torch.arange(sequence, device=batch.tokens.device)
    distance = index[:, None] - index[None, :]
    seen = distance >= 0
    if windowed:
        assert window is not None
        seen &= distance < window
    if batch.documents is None:
        return seen[None]
    return seen & (batch.documents[:, :, None] == batch.documents[:, None, :])


def layer_window(spec: ModelSpec, layer: int) -> int | None:
    """The sliding window of one layer; None: it sees everything before it."""
    return spec.sliding_window if layer >= spec.window_from_layer else None


def prepare(
    spec: ModelSpec, batch: MicroBatch, layers: range, dtype: torch.dtype, randomness: Randomness | None
) -> LayerContext:
    """Build what ``layers`` share for one micro-batch, once."""
    # 16-bit models turn in float32: it is exact there, and on CPU several times as fast
    wide = dtype if dtype == torch.float64 else torch.float32
    rotary = rotary_tables(spec, batch.positions, wide) if spec.positions == "rope" else None
    rows, sequence = batch.tokens.shape
    context = LayerContext(rows, sequence, rotary, randomness=randomness, examples=batch.examples)
    for window in {layer_window(spec, layer) for layer in layers}:
        seen = visible(batch, window)
        if seen is not None:
            # additive at once: scaled_dot_product_attention would convert a bool mask anew in every layer
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            context.masks[window] = mask[:, None]
        else:
            context.masks[window] = None
    return context


def split_rotate(
    qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``[batch, sequence, heads + 2 kv_heads, size]`` to q and k, turned by ``rotary``, and v."""
    cosine, sine = rotary if rotary is not None else (None, None)
    if torch.compiler.is_compiling():  # the compiler fuses plain operations, and does not take the in-place ones
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=2)
        if cosine is None or sine is None:
            return q, k, v
        return _turned(q, cosine, sine), _turned(k, cosine, sine), v
    result: tuple[Tensor, Tensor, Tensor] = _SplitRotate.apply(  # type: ignore[no-untyped-call]
        qkv, cosine, sine, heads, kv_heads
    )
    return result


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1).to(x.dtype)


class _SplitRotate(torch.autograd.Function):
    """Fused qkv to rotated q, k and v; backward writes one fused gradient instead of three padded ones."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cosine: Tensor | None, sine: Tensor | None, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.rotary = (cosine, sine)
        turned = heads + kv_heads
        out = qkv
        if cosine is not None and sine is not None:
            out = torch.empty_like(qkv)
            _rotate(qkv[:, :, :turned], cosine, sine, out[:, :, :turned], 1)
            out[:, :, turned:] = qkv[:, :, turned:]
        return out[:, :, :heads], out[:, :, heads:turned], out[:, :, turned:]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        grad_q, grad_k, grad_v = gradients
        batch, sequence, heads, size = grad_q.shape
        kv_heads = grad_k.shape[2]
        result = grad_q.new_empty((batch, sequence, heads + 2 * kv_heads, size))
        parts = result.split((heads, kv_heads, kv_heads), dim=2)
        cosine, sine = ctx.rotary
        for gradient, part in zip((grad_q, grad_k), parts[:2], strict=True):
            if cosine is None:
                part.copy_(gradient)
            else:
                _rotate(gradient, cosine, sine, part, -1)
        parts[2].copy_(grad_v)
        return result, None, None, None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, out: Tensor, direction: int) -> None:
    """``out = x`` turned by the angles (``direction`` -1: turned back), all ``[batch, sequence, heads, size]``."""
    if x.dtype != cosine.dtype:
        wide = torch.empty(x.shape, dtype=cosine.dtype, device=x.device)
        _rotate(x.to(cosine.dtype), cosine, sine, wide, direction)
        out.copy_(wide)
        return
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    torch.mul(low, cosine, out=out[..., :half]).addcmul_(high, sine, value=-direction)
    torch.mul(high, cosine, out=out[..., half:]).addcmul_(low, sine, value=direction)


class AttentionCore(nn.Module):
    """From the fused ``qkv`` product to the input of the output projection; no weights but the optional head norms.

    This is the part that selective recomputation wraps.

    Args:
        spec: the model.
        layer: global index of the layer.
        partition: which heads are here.
    """

    def __init__(self, spec: ModelSpec, layer: int, partition: Partition) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.heads = spec.heads // partition.degree
        self.kv_heads = spec.kv_heads // partition.degree
        self.first_head = partition.index * self.heads
        self.window = layer_window(spec, layer)

    def forward(
        self, qkv: Tensor, context: LayerContext, q_norm: Norm | None = None, k_norm: Norm | None = None
    ) -> Tensor:
        """``[tokens, (heads + 2 kv_heads) * head_size] -> [tokens, heads * head_size]``."""
        tokens = qkv.shape[0]
        size = self.spec.head_size
        qkv = qkv.view(context.batch, context.sequence, self.heads + 2 * self.kv_heads, size)
        if q_norm is not None and k_norm is not None:
            q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=2)
            qkv = torch.cat((q_norm(q), k_norm(k), v), dim=2)
        q, k, v = (part.transpose(1, 2) for part in split_rotate(qkv, context.rotary, self.heads, self.kv_heads))
        mask = context.masks[self.window]
        if context.randomness is not None and self.spec.attention_dropout > 0:
            out = self._explicit(q, k, v, mask, context)
        elif q.device.type == "cpu" and q.element_size() == 2:
            out = narrow_attention(q, k, v, mask)
        else:
            grouped = self.heads != self.kv_heads
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(tokens, self.heads * size)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, context: LayerContext) -> Tensor:
        """With attention dropout: probabilities written out, ``[batch, heads, sequence, sequence]``."""
        assert context.randomness is not None and context.examples is not None
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        sequence, rows = context.sequence, context.batch
        scores = (q * self.spec.head_size**-0.5) @ k.transpose(2, 3)
        if mask is None:
            index = torch.arange(sequence, device=q.device)
            scores = scores.masked_fill(index[None, :] > index[:, None], float("-inf"))
        else:
            scores = scores + mask
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        probabilities = torch.softmax(scores, -1, dtype=wide).to(q.dtype)
        first = torch.arange(self.heads * sequence, device=q.device) + self.first_head * sequence
        keep = context.randomness.keep(
            self.spec.attention_dropout,
            self.layer,
            "probabilities",
            context.examples.repeat_interleave(self.heads * sequence),
            (first * sequence).repeat(rows),
            sequence,
        )
        return dropped(probabilities, keep.view(probabilities.shape), self.spec.attention_dropout) @ v
