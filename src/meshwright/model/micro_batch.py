"""What the networks need to know of a micro-batch (``data.Batch`` fits it)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

IGNORE = -100
"""Label of a token that is not counted in the loss."""


class MicroBatch(Protocol):
    """One micro-batch of one data-parallel rank; all tensors are int64."""

    @property
    def tokens(self) -> Tensor:
        """``[batch, sequence]``."""

    @property
    def labels(self) -> Tensor:
        """``[batch, sequence]``: the target after each token, or ``IGNORE``."""

    @property
    def positions(self) -> Tensor:
        """``[batch, sequence]``; restarts where a document starts."""

    @property
    def documents(self) -> Tensor | None:
        """``[batch, sequence]``: equal inside one document; None where nothing has to be masked."""

    @property
    def examples(self) -> Tensor:
        """``[batch]``: global example number in the step; -1 for padding rows."""
