"""The shape of a decoder transformer, and the full names and shapes of its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from meshwright.job.sentences import either

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ModelSpec(BaseModel):
    """One decoder transformer, from GPT-2 to Llama, Qwen and Mistral.

    Sizes are counts; ``dropout`` values are probabilities. ``kv_heads``, ``head_size`` default to
    ``heads`` and ``hidden // heads``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = "custom"
    """What messages call it."""
    vocabulary: PositiveInt
    """Rows of the embedding, and of the head."""
    hidden: PositiveInt
    """Width of the residual stream."""
    layers: PositiveInt
    """Transformer blocks."""
    heads: PositiveInt
    """Query heads."""
    kv_heads: NonNegativeInt = 0  # 0: as many as heads, filled in below
    """Key and value heads, shared by groups of query heads; 0: as many as ``heads``."""
    head_size: NonNegativeInt = 0  # 0: hidden // heads, filled in below
    """Width of one head; 0: ``hidden / heads``."""
    ffn_hidden: PositiveInt
    """Width inside the MLP."""
    max_positions: PositiveInt = 131072
    """Rows of the learned position table, and so the longest sequence with it; `rope` has no longest."""
    positions: Literal["learned", "rope"] = "rope"
    """Added to the embedding (GPT-2), or rotations of q and k (Llama)."""
    rope_theta: _Positive = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: Annotated[tuple[float, float, float, float], Field(strict=False)] | None = None
    """Llama-3.1 frequency scaling: factor, low_freq_factor, high_freq_factor, original_max_positions."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """What stands before attention, before the MLP and at the end."""
    norm_eps: _Positive = 1e-5
    """Added to the variance."""
    activation: Literal["gelu_tanh", "gelu", "silu"] = "silu"
    """Inside the MLP."""
    gated: bool = True
    """SwiGLU-style MLP: down(activation(gate(x)) * up(x)); otherwise down(activation(up(x)))."""
    qkv_bias: bool = False
    """Biases on the q, k and v projections."""
    output_bias: bool = False
    """Bias on the projection out of attention."""
    mlp_bias: bool = False
    """Biases on the MLP's projections."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotation (Qwen3)."""
    tied: bool = False
    """The output head is the embedding matrix."""
    sliding_window: PositiveInt | None = None
    """Each token sees itself and the ``sliding_window - 1`` tokens before it."""
    window_from_layer: NonNegativeInt = 0
    """Layers with a lower index see everything (Qwen2 ``max_window_layers``)."""
    dropout: float = 0.0
    """On the embedding output and on each residual branch."""
    attention_dropout: float = 0.0
    """On the attention weights."""
    init_std: _Positive = 0.02
    """Standard deviation of initial weights."""
    residual_init_scale: bool = True
    """Projections into the residual stream start at ``init_std / sqrt(2 * layers)`` (GPT-2)."""
    experts: NonNegativeInt = 0
    """Number of experts per layer; 0 for a dense model. Expert models can be planned, not trained."""
    experts_per_token: NonNegativeInt = 0
    """Experts that each token goes to."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        heads, hidden = values.get("heads"), values.get("hidden")
        if not values.get("kv_heads"):
            values["kv_heads"] = heads
        if not values.get("head_size") and isinstance(heads, int) and isinstance(hidden, int) and heads > 0 < hidden:
            if hidden % heads:
                raise ValueError(f"hidden={hidden} is not a multiple of heads={heads}; give head_size or change one")
            values["head_size"] = hidden // heads
        return values

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.heads % self.kv_heads:
            legal = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; use {either(legal)}")
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError(f"head_size={self.head_size} must be even for rope positions")
        if not 0 <= self.experts_per_token <= self.experts or bool(self.experts) != bool(self.experts_per_token):
            raise ValueError(
                f"experts_per_token={self.experts_per_token} does not fit experts={self.experts}; "
                f"use 1 to {self.experts}, or leave both out for a dense model"
            )
        for field in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 0 and below 1")
        if self.rope_scaling is not None:
            _, low, high, _ = self.rope_scaling
            if not all(0 < number < math.inf for number in self.rope_scaling) or low >= high:
                raise ValueError(
                    f"rope_scaling={list(self.rope_scaling)} must be four finite numbers above 0, the second "
                    "(low_freq_factor) below the third (high_freq_factor), such as [8.0, 1.0, 4.0, 8192.0]"
                )
        return self

    def embedding_parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Full name and global shape of the parameters before the first layer."""
        yield "embedding.weight", (self.vocabulary, self.hidden)
        if self.positions == "learned":
            yield "position_embedding.weight", (self.max_positions, self.hidden)

    def layer_parameters(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Full name and global shape of the parameters of one layer."""
        hidden, ffn = self.hidden, self.ffn_hidden
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        prefix = f"layers.{layer}."

        def norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
            yield f"{prefix}{name}.weight", (hidden,)
            if self.norm == "layernorm":
                yield f"{prefix}{name}.bias", (hidden,)

        def linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
            yield f"{prefix}{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{name}.bias", (rows,)

        yield from norm("attention_norm")
        yield from linear("attention.q", q, hidden, self.qkv_bias)
        yield from linear("attention.k", kv, hidden, self.qkv_bias)
        yield from linear("attention.v", kv, hidden, self.qkv_bias)
        if self.qk_norm:
            yield f"{prefix}attention.q_norm.weight", (self.head_size,)
            yield f"{prefix}attention.k_norm.weight", (self.head_size,)
        yield from linear("attention.output", hidden, q, self.output_bias)
        yield from norm("mlp_norm")
        if self.experts:
            yield f"{prefix}mlp.router.weight", (self.experts, hidden)
        for mlp in [f"mlp.experts.{expert}" for expert in range(self.experts)] or ["mlp"]:
            if self.gated:
                yield from linear(f"{mlp}.gate", ffn, hidden, self.mlp_bias)
            yield from linear(f"{mlp}.up", ffn, hidden, self.mlp_bias)
            yield from linear(f"{mlp}.down", hidden, ffn, self.mlp_bias)

    def head_parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Full name and global shape of the parameters after the last layer."""
        yield "final_norm.weight", (self.hidden,)
        if self.norm == "layernorm":
            yield "final_norm.bias", (self.hidden,)
        if not self.tied:
            yield "head.weight", (self.vocabulary, self.hidden)

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Full name and global shape of every parameter, in the order of the network."""
        yield from self.embedding_parameters()
        for layer in range(self.layers):
            yield from self.layer_parameters(layer)
        yield from self.head_parameters()

    @property
    def parameter_count(self) -> int:
        """Number of scalar parameters (a tied head counts once)."""
        return sum(math.prod(shape) for _, shape in self.parameters())
