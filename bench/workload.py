"""The common work: one Llama-style model, one stream of tokens, one optimizer setting, for every contestant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from meshwright.job.model_spec import ModelSpec

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """11 M parameters by default: large enough for real matmuls, small enough for two CPU cores."""

    dtype: Dtype = "float32"
    vocabulary: int = 8192
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    ffn_hidden: int = 768
    sequence: int = 256
    batch: int = 8
    """Sequences a step over all ranks."""
    micro_batches: int = 8
    """Of the pipeline schedules."""
    lr: float = 3e-4
    weight_decay: float = 0.1
    seed: int = 1234

    @property
    def tokens_per_step(self) -> int:
        """Target tokens in a step over all ranks; all of them count."""
        return self.batch * self.sequence

    @property
    def spec(self) -> ModelSpec:
        """The model in meshwright's terms."""
        return ModelSpec(
            vocabulary=self.vocabulary,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            ffn_hidden=self.ffn_hidden,
            max_positions=self.sequence,
            tied=False,
        )

    def step_data(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of a step, each ``[batch, sequence]`` int64; frequencies fall off as in text."""
        uniform = np.random.default_rng((self.seed, step)).random((self.batch, self.sequence + 1))
        ids = torch.from_numpy((self.vocabulary * uniform**3).astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def share(self, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """The rows of a data-parallel rank."""
        tokens, labels = self.step_data(step)
        rows = self.batch // ranks
        part = slice(rank * rows, (rank + 1) * rows)
        return tokens[part], labels[part]
