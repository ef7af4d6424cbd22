"""The seam for tensor parallelism: how one layer's matrix products are split over ranks.

The base class is the single device: nothing is split. Hidden states are ``[tokens, hidden]`` with
``tokens = batch * sequence``, batch-major; under sequence parallelism each rank holds one contiguous
chunk of that axis, written ``tokens/t``.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from meshwright.model.cross_entropy import CHUNK_ELEMENTS, cross_entropy_sum


class Partition:
    """A single device; ``parallel.tensor`` overrides every method."""

    degree: int = 1
    index: int = 0
    vocabulary: int | None = None
    """The model's vocabulary, set by ``StageModel``: logits beyond it are padding."""
    loss_chunk: int = CHUNK_ELEMENTS
    """Logits that the loss works on at a time."""

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[tokens/t, in] -> [tokens, out/t]``: ``weight`` holds this rank's output rows."""
        return F.linear(x, weight, bias)

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[tokens, in/t] -> [tokens/t, out]``: ``weight`` holds this rank's input columns; ``bias`` is whole."""
        return F.linear(x, weight, bias)

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """``[tokens] -> [tokens/t, hidden]``: ``weight`` holds this rank's vocabulary rows."""
        return F.embedding(ids, weight)

    def loss(self, x: Tensor, weight: Tensor, labels: Tensor, divisor: float | Tensor) -> Tensor:
        """Sum of cross entropy over counted labels, divided by ``divisor``.

        ``x`` is ``[tokens/t, hidden]``, ``labels`` ``[tokens]``; softmax and sum are in float32
        (float64 for float64 input).
        """
        return cross_entropy_sum(
            F.linear(x, weight), labels, divisor, vocabulary=self.vocabulary, chunk_elements=self.loss_chunk
        )

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """``[tokens/t, hidden] -> [tokens, vocabulary]`` whole, at least float32, for evaluation and sampling."""
        logits = F.linear(x, weight)
        if self.vocabulary is not None:
            logits = logits[:, : self.vocabulary]
        return logits if logits.element_size() >= 4 else logits.float()

    def my_tokens(self, x: Tensor) -> Tensor:
        """This rank's contiguous chunk ``[tokens/t, ...]`` of ``[tokens, ...]``."""
        return x

    def token_offset(self, tokens: int) -> int:
        """Number of the first of this rank's tokens, of ``tokens`` in all."""
        return self.index * (tokens // self.degree)
