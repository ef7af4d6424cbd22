"""What forward leaves alive for backward, part by part, in closed form.

The functions take an ``Extents`` of numbers, or of NumPy arrays that broadcast (rows, sequence, tp, element), and give
bytes of one micro-batch on one tensor parallel rank. They say in sums what ``plan.walk`` says in order; tests hold the
two against each other. A layer's input belongs to what stands before it: to the layer below, or to the embedding.
"""

from __future__ import annotations

from typing import Any

from meshwright.job.layout import Recompute
from meshwright.plan.extents import Extents

Number = Any
"""Bytes: a number, or an array."""
Parts = dict[str, Number]


def layer_activations(x: Extents, policy: Recompute = "none") -> Parts:
    """Bytes of one layer by what they are, its output included, its input not."""
    spec = x.spec
    if policy == "full":
        return {"output": x.own}
    mask = x.own_tokens * spec.hidden if spec.dropout > 0 else 0
    parts = {
        "norm outputs": 2 * x.own,
        "norm statistics": 2 * norm_statistics(x),
        "attention": attention_activations(x) if policy == "none" else x.qkv + x.q,
        "residual": x.own,
        "gate and up" if spec.gated else "up": x.up,
        "activation": x.ffn * (2 if spec.gated and spec.activation != "silu" else 1),
        "dropout masks": 2 * mask,
        "output": x.own,
    }
    return parts


def attention_activations(x: Extents) -> Number:
    """Bytes that the attention keeps: its inputs, its result, and what its backward needs beside them."""
    spec = x.spec
    heads = head_norm_activations(x) if spec.qk_norm else 0
    if spec.attention_dropout == 0:
        return heads + x.qkv + x.q + x.lse
    # Written out: q, k, v of every head, probabilities (wide), their mask, what is left of them, and the result.
    causal = 0 if x.masked else x.sequence * x.sequence
    return heads + 4 * x.q + x.pairs * (x.wide + 1 + x.element) + causal


def head_norm_activations(x: Extents) -> Number:
    """Bytes that norms of q and k keep; the only head of its kind is a view, which keeps the whole fused product."""
    many_q, many_k = x.heads > 1, x.kv_heads > 1
    copies = many_q * x.q + many_k * x.kv + (1 - many_q * many_k) * x.qkv
    return copies + (x.heads + x.kv_heads) * x.row


def norm_statistics(x: Extents) -> Number:
    """Bytes of a norm's numbers a token: a wide scale, or mean and deviation."""
    return 2 * x.own_tokens * x.element if x.spec.norm == "layernorm" else x.own_row


def embedding_activations(x: Extents) -> Parts:
    """Bytes of the embedding on the first stage."""
    spec = x.spec
    return {
        "embedding output": x.own,
        "embedding rows": 8 * x.tokens * (x.tp > 1),
        "dropout masks": x.own_tokens * spec.hidden if spec.dropout > 0 else 0 * x.own,
    }


def head_activations(x: Extents) -> Parts:
    """Bytes of the final norm, the head and the loss on the last stage; the logits' buffer becomes their gradient."""
    return {
        "final norm": x.own + norm_statistics(x),
        "logits": x.logits,
        "loss": 10 * x.tokens + 3 * x.row + x.wide,
    }
