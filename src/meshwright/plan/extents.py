"""Bytes of the tensors that one micro-batch is made of on one rank: the terms of all activation formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.job.model_spec import ModelSpec

Number = Any
"""An integer, or an array of them."""
LOSS_CHUNK = 1 << 18
"""Elements of the logits that the loss works on at a time on a CPU."""
DEVICE_LOSS_CHUNK = 1 << 25
"""The same on a CUDA device."""


@dataclass(frozen=True)
class Extents:
    """Sizes of one micro-batch on one tensor parallel rank. Numbers, or arrays that broadcast.

    Properties are bytes, unless they say elements.
    """

    spec: ModelSpec
    rows: Number
    """Sequences."""
    sequence: Number
    """Their length in tokens."""
    tp: Number
    element: Number
    """Bytes of an element in forward and backward."""
    masked: bool = False
    """Documents are masked, so that every sequence has a mask of its own."""
    loss_chunk: int = LOSS_CHUNK
    """Logits that the loss works on at a time (a number)."""

    @property
    def tokens(self) -> Number:
        """Of the micro-batch (elements)."""
        return self.rows * self.sequence

    @property
    def own_tokens(self) -> Number:
        """Between the matrix products: 1/tp of them (elements)."""
        return self.tokens // self.tp

    @property
    def heads(self) -> Number:
        """Query heads here (a number)."""
        return self.spec.heads // self.tp

    @property
    def kv_heads(self) -> Number:
        """Key and value heads here (a number)."""
        return self.spec.kv_heads // self.tp

    @property
    def inner(self) -> Number:
        """MLP columns here (a number)."""
        return self.spec.ffn_hidden // self.tp

    @property
    def columns(self) -> Number:
        """Vocabulary columns here, padding included (a number)."""
        return -(-self.spec.vocabulary // self.tp)

    @property
    def wide(self) -> Number:
        """Bytes of an element of sums and statistics: at least float32."""
        return self.element * (self.element >= 4) + 4 * (self.element < 4)

    @property
    def narrow(self) -> bool:
        """16 bits: some operations work on float32 copies."""
        return bool(self.element < 4)

    @property
    def own(self) -> Number:
        """``[tokens/t, hidden]``: the residual stream."""
        return self.own_tokens * self.spec.hidden * self.element

    @property
    def whole(self) -> Number:
        """``[tokens, hidden]``: gathered over the tensor parallel ranks."""
        return self.tokens * self.spec.hidden * self.element

    @property
    def own_row(self) -> Number:
        """One number a token of this rank's, wide."""
        return self.own_tokens * self.wide

    @property
    def row(self) -> Number:
        """One number a token, wide."""
        return self.tokens * self.wide

    @property
    def q(self) -> Number:
        """Queries, or the attention's output: ``[tokens, heads * head_size]``."""
        return self.tokens * self.heads * self.spec.head_size * self.element

    @property
    def kv(self) -> Number:
        """Keys, or values."""
        return self.tokens * self.kv_heads * self.spec.head_size * self.element

    @property
    def qkv(self) -> Number:
        """The fused product."""
        return self.q + 2 * self.kv

    @property
    def ffn(self) -> Number:
        """``[tokens, ffn_hidden / t]``."""
        return self.tokens * self.inner * self.element

    @property
    def up(self) -> Number:
        """Output of the first product of the MLP: gate and up, if gated."""
        return self.ffn * (2 if self.spec.gated else 1)

    @property
    def lse(self) -> Number:
        """Log-sum-exp of fused attention: one wide number a head and token."""
        return self.tokens * self.heads * self.wide

    @property
    def pairs(self) -> Number:
        """Query-key pairs of the heads here (elements): attention that is written out."""
        return self.tokens * self.sequence * self.heads

    @property
    def logits(self) -> Number:
        """``[tokens, columns]``."""
        return self.tokens * self.columns * self.element

    @property
    def tables(self) -> Number:
        """Cosine and sine of the rotation, at least float32."""
        if self.spec.positions != "rope":
            return 0 * self.tokens
        return self.tokens * self.spec.head_size * self.wide

    def has_mask(self, window: int | None) -> bool:
        """Whether a layer with this window needs a mask; plain causal attention does not."""
        return self.masked or (window is not None and bool(window < self.sequence))

    @property
    def mask(self) -> Number:
        """One additive mask; without documents it is the same for all sequences."""
        return (self.rows if self.masked else 1) * self.sequence * self.sequence * self.element
