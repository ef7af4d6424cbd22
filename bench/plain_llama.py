"""A Llama-style decoder as people write it in plain PyTorch: ordinary modules, separate q, k and v."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.workload import Workload
from meshwright.model.initialise import fill
from meshwright.model.segments import Segment


class Attention(nn.Module):
    """Causal self-attention with rotary positions.

    Heads are counted from the projections' own output, so the module is right on a tensor-parallel rank too.
    """

    def __init__(self, hidden: int, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """``x``: ``[batch, sequence, hidden]``; ``rotary``: ``[2, sequence, head_size]``, cosines and sines."""
        batch, sequence, _ = x.shape
        q, k, v = (
            projection(x).view(batch, sequence, -1, self.head_size).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
        attended: Tensor = self.output(out.transpose(1, 2).reshape(batch, sequence, -1))
        return attended


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn_hidden, bias=False)
        self.up = nn.Linear(hidden, ffn_hidden, bias=False)
        self.down = nn.Linear(ffn_hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, sequence, hidden]`` in and out."""
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(work.hidden, eps=1e-5)
        self.attention = Attention(work.hidden, work.hidden // work.heads)
        self.mlp_norm = nn.RMSNorm(work.hidden, eps=1e-5)
        self.mlp = MLP(work.hidden, work.ffn_hidden)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """``[batch, sequence, hidden]`` in and out."""
        x = x + self.attention(self.attention_norm(x), rotary)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class PlainLlama(nn.Module):
    """The whole model, or one pipeline stage of it. Parameters bear the full logical names."""

    rotary: Tensor

    def __init__(self, work: Workload, layers: range | None = None, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(work.vocabulary, work.hidden) if first else None
        mine = range(work.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(layer): Layer(work) for layer in mine})
        self.final_norm = nn.RMSNorm(work.hidden, eps=1e-5) if last else None
        self.head = nn.Linear(work.hidden, work.vocabulary, bias=False) if last else None
        self.register_buffer("rotary", rotary_table(work.sequence, work.hidden // work.heads), persistent=False)
        start_as_meshwright(self, work)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids ``[batch, sequence]``, or a later stage's hidden states, to logits or hidden states."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.rotary)
        if self.final_norm is not None and self.head is not None:
            x = self.head(self.final_norm(x))
        return x


def rotary_table(sequence: int, head_size: int, theta: float = 10000.0) -> Tensor:
    """Cosines and sines, ``[2, sequence, head_size]``."""
    frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float32), frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary positions on ``[batch, heads, sequence, head_size]``."""
    low, high = x.chunk(2, dim=-1)
    table = rotary.to(x.dtype)
    return x * table[0] + torch.cat([-high, low], dim=-1) * table[1]


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def start_as_meshwright(model: nn.Module, work: Workload) -> None:
    """Give every parameter the value it has in meshwright, so that all contestants' losses can be compared."""
    shapes = dict(work.spec.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = shapes[name]
            whole = Segment(name=name, shape=shape, offsets=(0,) * len(shape), sizes=shape, start=0)
            fill(parameter.data, (whole,), work.spec, work.seed)
