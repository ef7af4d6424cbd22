"""The sizes that costs depend on: of one model, or arrays of them, one for each layout.

Every formula of ``array_memory`` and ``array_time`` broadcasts, so a table of measured runs of many models is
predicted in one call, and many layouts of one model in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from meshwright.plan.arrays import Floats, Work

Value = float | Floats


@dataclass(frozen=True)
class Shape:
    """Sizes as floats, or as arrays over the layouts."""

    layers: Value
    hidden: Value
    heads: Value
    head_size: Value
    kv_heads: Value
    ffn: Value
    gated: Value
    """1: the MLP has a gate beside its up projection."""
    vocabulary: Value
    positions: Value
    """Rows of the learned position table; 0 for none."""
    tied: Value
    sequence: Value
    window: Value
    """Tokens that attention looks back; the sequence where there is no window."""
    global_batch: Value
    norm_parameters: Value
    """Vectors of a norm: 1 scale, or scale and shift."""
    biases: Value
    """Elements of a layer's biases that tensor parallelism splits."""
    whole_biases: Value
    """Those it does not."""
    layer_norm: Value = 0.0
    """1: the norms also subtract the mean."""

    @classmethod
    def of(cls, work: Work) -> Shape:
        """The sizes of one model."""
        spec = work.spec
        q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        return cls(
            layers=float(spec.layers),
            hidden=float(spec.hidden),
            heads=float(spec.heads),
            head_size=float(spec.head_size),
            kv_heads=float(spec.kv_heads),
            ffn=float(spec.ffn_hidden),
            gated=float(spec.gated),
            vocabulary=float(spec.vocabulary),
            positions=float(spec.max_positions if spec.positions == "learned" else 0),
            tied=float(spec.tied),
            sequence=float(work.sequence),
            window=float(min(work.sequence, spec.sliding_window or work.sequence)),
            global_batch=float(work.global_batch),
            norm_parameters=2.0 if spec.norm == "layernorm" else 1.0,
            biases=float((q + 2 * kv) * spec.qkv_bias + (1 + spec.gated) * spec.ffn_hidden * spec.mlp_bias),
            whole_biases=float(
                spec.hidden * (spec.output_bias + spec.mlp_bias) + 2 * spec.head_size * int(spec.qk_norm)
            ),
            layer_norm=float(spec.norm == "layernorm"),
        )

    @classmethod
    def join(cls, shapes: Sequence[Shape]) -> Shape:
        """One array a field."""
        return cls(
            **{each.name: np.array([getattr(shape, each.name) for shape in shapes], float) for each in fields(cls)}
        )

    @property
    def query(self) -> Value:
        """Width of all query heads."""
        return self.heads * self.head_size

    @property
    def key_value(self) -> Value:
        """Width of all key heads (and of all value heads)."""
        return self.kv_heads * self.head_size

    def split_parameters(self) -> Value:
        """Parameters of a layer that tensor parallelism splits."""
        attention = self.hidden * (2 * self.query + 2 * self.key_value)
        return attention + self.hidden * self.ffn * (2 + self.gated) + self.biases

    def whole_parameters(self) -> Value:
        """Parameters of a layer that every tp rank holds."""
        return 2 * self.norm_parameters * self.hidden + self.whole_biases

    def parameters(self) -> Value:
        """Of the whole model; a tied head once."""
        ends = self.vocabulary * self.hidden * (2 - self.tied) + (self.positions + self.norm_parameters) * self.hidden
        return self.layers * (self.split_parameters() + self.whole_parameters()) + ends

    def pairs(self) -> Value:
        """Query-key pairs of one sequence and head, causal, by the ledger's convention."""
        return self.sequence * self.window - self.window**2 / 2

    def matrix_flops(self) -> Value:
        """Forward FLOPs of one token in one layer's matrix products."""
        attention = self.hidden * (2 * self.query + 2 * self.key_value)
        return 2 * (attention + self.hidden * self.ffn * (2 + self.gated))

    def attention_flops(self) -> Value:
        """Forward FLOPs of one sequence in one layer's attention, causal."""
        return 4 * self.query * self.pairs()

    def model_flops(self) -> Value:
        """Forward and backward FLOPs of one step of the whole model."""
        tokens = self.global_batch * self.sequence
        layers = self.layers * (tokens * self.matrix_flops() + self.global_batch * self.attention_flops())
        return 3 * (layers + 2 * tokens * self.hidden * self.vocabulary)
