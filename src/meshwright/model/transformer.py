"""One pipeline stage (or all) of a decoder transformer, from GPT-2 to Llama, Qwen and Mistral.

Hidden states are ``[tokens, hidden]`` with ``tokens = batch * sequence``, batch-major. All matrix products go
through a ``Partition``, so the same modules serve one device and tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.job.model_spec import ModelSpec
from meshwright.model.activations import activate
from meshwright.model.attention import AttentionCore, LayerContext, prepare
from meshwright.model.dropout import Randomness, dropped
from meshwright.model.micro_batch import MicroBatch
from meshwright.model.norms import Norm
from meshwright.model.partition import Partition
from meshwright.model.placement import place_parameters, vocabulary_rows
from meshwright.model.segments import Segment


class Matrix(nn.Module):
    """A weight ``[rows, columns]`` and an optional bias ``[rows]``; the product is the partition's."""

    def __init__(self, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None


class Attention(nn.Module):
    """Self-attention of one layer, this rank's heads."""

    def __init__(self, spec: ModelSpec, layer: int, partition: Partition) -> None:
        super().__init__()
        self.partition = partition
        heads, kv_heads, size = spec.heads // partition.degree, spec.kv_heads // partition.degree, spec.head_size
        self.qkv = Matrix((heads + 2 * kv_heads) * size, spec.hidden, spec.qkv_bias)
        self.q_norm = Norm(size, "rmsnorm", spec.norm_eps) if spec.qk_norm else None
        self.k_norm = Norm(size, "rmsnorm", spec.norm_eps) if spec.qk_norm else None
        self.core = AttentionCore(spec, layer, partition)
        self.output = Matrix(spec.hidden, heads * size, spec.output_bias)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """``[tokens/t, hidden] -> [tokens/t, hidden]``."""
        qkv = self.partition.column(x, self.qkv.weight, self.qkv.bias)
        mixed = self.core(qkv, context, self.q_norm, self.k_norm)
        return self.partition.row(mixed, self.output.weight, self.output.bias)


class Mlp(nn.Module):
    """The MLP of one layer, this rank's intermediate columns."""

    def __init__(self, spec: ModelSpec, partition: Partition) -> None:
        super().__init__()
        self.spec = spec
        self.partition = partition
        inner = spec.ffn_hidden // partition.degree
        if spec.gated:
            self.gate_up = Matrix(2 * inner, spec.hidden, spec.mlp_bias)
        else:
            self.up = Matrix(inner, spec.hidden, spec.mlp_bias)
        self.down = Matrix(spec.hidden, inner, spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens/t, hidden] -> [tokens/t, hidden]``."""
        first = self.gate_up if self.spec.gated else self.up
        inner = activate(self.spec, self.partition.column(x, first.weight, first.bias))
        return self.partition.row(inner, self.down.weight, self.down.bias)


class Block(nn.Module):
    """One layer: attention and MLP, each after a norm and added to its input."""

    def __init__(self, spec: ModelSpec, layer: int, partition: Partition) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.partition = partition
        self.attention_norm = Norm(spec.hidden, spec.norm, spec.norm_eps)
        self.attention = Attention(spec, layer, partition)
        self.mlp_norm = Norm(spec.hidden, spec.norm, spec.norm_eps)
        self.mlp = Mlp(spec, partition)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """``[tokens/t, hidden] -> [tokens/t, hidden]``."""
        x = x + self._drop(self.attention(self.attention_norm(x), context), "attention", context)
        return x + self._drop(self.mlp(self.mlp_norm(x)), "mlp", context)

    def _drop(self, x: Tensor, site: str, context: LayerContext) -> Tensor:
        return drop_hidden(x, self.spec.dropout, self.layer, site, context, self.partition)


def drop_hidden(
    x: Tensor, probability: float, layer: int, site: str, context: LayerContext, partition: Partition
) -> Tensor:
    """Dropout on this rank's ``[tokens/t, hidden]``: the mask's element is ``position * hidden + column``."""
    if probability == 0.0 or context.randomness is None:
        return x
    assert context.examples is not None
    rows, width = x.shape
    token = torch.arange(rows, device=x.device) + partition.token_offset(context.batch * context.sequence)
    examples = context.examples[token // context.sequence]
    keep = context.randomness.keep(probability, layer, site, examples, token % context.sequence * width, width)
    return dropped(x, keep, probability)


class StageModel(nn.Module):
    """Consecutive layers of the network, with the embedding if ``first`` and the head if ``last``.

    Built with uninitialised parameters on the current default device and dtype (also ``meta``); fill them with
    ``initialise`` or from a file.

    Args:
        spec: the model.
        layers: global indices of the layers here.
        first: whether the embedding is here.
        last: whether the final norm, the head and the loss are here.
        partition: how matrix products are split over tensor parallel ranks.

    Attributes:
        segments: physical parameter FQN to the logical boxes in it.
        tp_replicated: physical FQNs that are whole on every tensor parallel rank. Their gradients are each rank's
            part (of the tokens, or of the heads) and have to be summed over the ranks.
        randomness: set before each training step of a model with dropout.
    """

    segments: dict[str, tuple[Segment, ...]]
    tp_replicated: frozenset[str]

    def __init__(
        self, spec: ModelSpec, layers: range, first: bool, last: bool, partition: Partition | None = None
    ) -> None:
        super().__init__()
        partition = Partition() if partition is None else partition
        partition.vocabulary = spec.vocabulary
        self.spec, self.layer_range, self.first, self.last = spec, layers, first, last
        self.partition = partition
        self.randomness: Randomness | None = None
        rows = vocabulary_rows(spec, partition.degree)
        if first:
            self.embedding = Matrix(rows, spec.hidden)
            if spec.positions == "learned":
                self.position_embedding = Matrix(spec.max_positions, spec.hidden)
        self.layers = nn.ModuleDict({str(layer): Block(spec, layer, partition) for layer in layers})
        if last:
            self.final_norm = Norm(spec.hidden, spec.norm, spec.norm_eps)
            if not (spec.tied and first):
                self.head = Matrix(rows, spec.hidden)
        self.segments, self.tp_replicated = place_parameters(
            spec, layers, first, last, partition.degree, partition.index
        )

    @property
    def head_weight(self) -> Tensor:
        """The output matrix (the embedding's, if tied and on the same stage)."""
        return self.embedding.weight if self.spec.tied and self.first else self.head.weight

    def forward(self, hidden: Tensor | None, batch: MicroBatch, divisor: float | Tensor | None = None) -> Tensor:
        """Run the stage.

        Args:
            hidden: ``[tokens/t, hidden]``, or None on the first stage.
            batch: the micro-batch.
            divisor: on the last stage: compute the loss, divided by this.

        Returns:
            ``[tokens/t, hidden]``, on the last stage after the final norm; the scalar loss with a ``divisor``.
        """
        embedded = self._embed(batch) if hidden is None else hidden
        context = prepare(self.spec, batch, self.layer_range, embedded.dtype, self._randomness())
        if hidden is None:
            embedded = drop_hidden(embedded, self.spec.dropout, -1, "embedding", context, self.partition)
        hidden = embedded
        for block in self.layers.values():
            hidden = block(hidden, context)
        if not self.last:
            return hidden
        hidden = self.final_norm(hidden)
        if divisor is None:
            return hidden
        return self.partition.loss(hidden, self.head_weight, batch.labels.reshape(-1), divisor)

    def loss(self, hidden: Tensor | None, batch: MicroBatch, divisor: float | Tensor) -> Tensor:
        """Forward of the last stage up to the loss: the sum over counted tokens, divided by ``divisor``."""
        result: Tensor = self(hidden, batch, divisor)
        return result

    def logits(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        """Forward of the last stage up to the logits ``[tokens, vocabulary]``."""
        return self.partition.logits(self(hidden, batch), self.head_weight)

    @torch.no_grad()
    def fill(self, read: Callable[[Segment], Tensor]) -> None:
        """Take each logical box of the parameters from ``read``; padding becomes zero."""
        parameters = dict(self.named_parameters())
        for fqn, segments in self.segments.items():
            physical = parameters[fqn].data
            if sum(segment.count for segment in segments) != physical.numel():
                physical.zero_()
            for segment in segments:
                segment.box(physical).copy_(read(segment))

    def _randomness(self) -> Randomness | None:
        if not self.training or (self.spec.dropout == 0.0 and self.spec.attention_dropout == 0.0):
            return None
        if self.randomness is None:
            raise RuntimeError("a model with dropout needs model.randomness set before a training step")
        return self.randomness

    def _embed(self, batch: MicroBatch) -> Tensor:
        hidden = self.partition.embed(batch.tokens.reshape(-1), self.embedding.weight)
        if self.spec.positions == "learned":
            positions = self.partition.my_tokens(batch.positions.reshape(-1))
            hidden = hidden + nn.functional.embedding(positions, self.position_embedding.weight)
        return hidden
