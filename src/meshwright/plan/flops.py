"""FLOPs of one rank and step, exact, by the conventions of ``ledger.ledger``.

With ``n`` tokens of a micro-batch, ``b`` sequences of ``s``, hidden size ``h``, ``a`` query and ``k`` key-value heads
of size ``d``, MLP width ``f``, vocabulary ``V`` and tensor parallel degree ``t``, a rank computes forward, per layer

    qkv          2 n h (a + 2 k) d / t         output     2 n h a d / t
    up, gate     2 n h f g / t  (g: 2 gated)   down       2 n h f / t
    attention    4 b d (a / t) pairs           pairs = s^2 / 2; with a window w < s: s w - w^2 / 2
    head         2 n h ceil(V / t)             on the last stage; embeddings multiply nothing

and backward twice that. Computed again: half an attention forward for each attention backward that runs as a fused
kernel; what a recompute policy says. Recomputation ends with the last operation whose inputs or results are saved:
a layer's ``down`` runs again only where dropout after it saves a mask.

With dropout on its weights, attention is written out in two plain products of all ``s^2`` pairs, without the half.

All functions but ``flops`` take numbers or NumPy arrays for the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.job.job import Job
from meshwright.job.layout import Recompute
from meshwright.job.model_spec import ModelSpec
from meshwright.ledger.ledger import Computes
from meshwright.plan.place import Place, StagePlace

Number = Any
"""An integer, or an array of them."""


@dataclass(frozen=True)
class LayerFlops:
    """Forward FLOPs of one layer and micro-batch on one rank."""

    qkv: Number
    attention: Number
    output: Number
    up: Number
    """Gate and up together, if gated."""
    down: Number
    attention_again: Number
    """What the attention's backward computes again by itself."""
    attention_without_end: Number
    """The attention when it runs again and stops as soon as everything is saved."""

    @property
    def forward(self) -> Number:
        """All of it."""
        return self.qkv + self.attention + self.output + self.up + self.down


def window_of(spec: ModelSpec, layer: int) -> int | None:
    """The sliding window of a layer, None where it sees everything."""
    return spec.sliding_window if layer >= spec.window_from_layer else None


def attention_forward(rows: Number, heads: Number, sequence: Number, size: Number, window: Number = None) -> Number:
    """Forward FLOPs of causal attention of ``heads`` heads; ``window``: not above ``sequence``, None: none."""
    if window is None:
        return 2 * rows * heads * size * sequence * sequence
    return 2 * rows * heads * size * window * (2 * sequence - window)


def layer_flops(spec: ModelSpec, rows: Number, sequence: Number, tp: Number, window: Number = None) -> LayerFlops:
    """Forward FLOPs of one layer on one of ``tp`` ranks.

    Args:
        spec: the model.
        rows: sequences of the micro-batch.
        sequence: their length.
        tp: tensor parallel ranks.
        window: of this layer, not above ``sequence``; None: it sees everything.
    """
    per_column = 2 * rows * sequence * spec.hidden
    heads, kv_heads = spec.heads // tp, spec.kv_heads // tp
    inner = spec.ffn_hidden // tp
    written_out = spec.attention_dropout > 0
    if written_out:
        attention = 4 * rows * heads * spec.head_size * sequence * sequence
    else:
        attention = attention_forward(rows, heads, sequence, spec.head_size, window)
    return LayerFlops(
        qkv=per_column * (heads + 2 * kv_heads) * spec.head_size,
        attention=attention,
        output=per_column * heads * spec.head_size,
        up=per_column * inner * (2 if spec.gated else 1),
        down=per_column * inner,
        attention_again=0 * attention if written_out else attention // 2,
        attention_without_end=attention // 2 if written_out else attention,
    )


def recompute_flops(spec: ModelSpec, layer: LayerFlops, policy: Recompute) -> Number:
    """What one layer computes again in the backward pass of a micro-batch."""
    again = layer.attention_again
    if policy == "selective":
        again = again + layer.attention_without_end
    elif policy == "full":
        again = again + layer.qkv + layer.attention + layer.output + layer.up
        if spec.dropout > 0:
            again = again + layer.down
    return again


def head_flops(spec: ModelSpec, tokens: Number, tp: Number) -> Number:
    """Forward FLOPs of the output head: padding of the vocabulary is multiplied too."""
    return 2 * tokens * spec.hidden * -(-spec.vocabulary // tp)


def flops(job: Job, place: Place) -> Computes:
    """The FLOPs of one rank in a step of a resolved job."""
    forward = recompute = 0
    for stage in place.stages:
        more, again = _stage(job, place, stage)
        forward, recompute = forward + more, recompute + again
    count = place.micro_batches
    return Computes(forward=count * forward, backward=2 * count * forward, recompute=count * recompute)


def _stage(job: Job, place: Place, stage: StagePlace) -> tuple[int, int]:
    """Forward and recomputed FLOPs of one micro-batch in one stage."""
    spec, tp = place.spec, job.layout.tp
    forward = recompute = 0
    for layer in stage.layers:
        window = window_of(spec, layer)
        if window is not None and window >= place.sequence:
            window = None
        each = layer_flops(spec, place.rows, place.sequence, tp, window)
        forward += each.forward
        recompute += recompute_flops(spec, each, stage.recompute)
    if stage.last:
        forward += head_flops(spec, place.tokens, tp)
    return forward, recompute
