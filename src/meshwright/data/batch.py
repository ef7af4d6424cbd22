"""What one data-parallel rank computes on: micro-batches of a global batch, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.packing import IGNORE, PADDING
from meshwright.data.samples import Samples
from meshwright.errors import InputError
from meshwright.job.schedule_rules import micro_steps


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Empty rows have no label that counts, so they change no loss and no gradient.

    Attributes:
        tokens: ``[batch, sequence]`` int64 ids.
        labels: ``[batch, sequence]`` int64, the target after each token; -100 is not counted.
        positions: ``[batch, sequence]`` int64, from 0 at each document's start.
        documents: ``[batch, sequence]`` int64, equal inside one document and -1 in padding; None: no masking needed.
        examples: ``[batch]`` int64, number in the global batch; -1 for an empty row.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    examples: Tensor

    @property
    def valid_tokens(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORE).sum())

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, sequence length."""
        return self.tokens.shape[0], self.tokens.shape[1]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same on ``device``."""
        return Batch(
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            positions=self.positions.to(device, non_blocking=non_blocking),
            documents=None if self.documents is None else self.documents.to(device, non_blocking=non_blocking),
            examples=self.examples.to(device, non_blocking=non_blocking),
        )


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def micro_batches(
    samples: Samples, indices: NDArray[np.int64], global_size: int, micro_batch: int, dp_rank: int, dp: int
) -> list[Batch]:
    """This rank's micro-batches of one global batch.

    Micro-batch j has the sequences ``j * micro_batch`` to ``(j + 1) * micro_batch - 1`` of the global batch, padded
    with empty rows, and goes to dp rank ``j % dp`` as its micro-step ``j // dp``. So its content does not depend on
    ``dp``, and every rank runs the same number of micro-steps.

    Args:
        samples: Where the rows come from.
        indices: ``[n]`` sample numbers of the global batch, ``n <= global_size``.
        global_size: Sequences a step.
        micro_batch: Sequences a micro-batch.
        dp_rank: This rank's place among the data-parallel ranks.
        dp: Data-parallel ranks.
    """
    if len(indices) > global_size:
        raise InputError(f"{len(indices)} samples are more than the global batch of {global_size} sequences")
    steps = micro_steps(global_size, micro_batch, dp)
    padded = np.full(steps * dp * micro_batch, PADDING, np.int64)
    padded[: len(indices)] = indices
    examples = np.where(padded >= 0, np.arange(len(padded)), PADDING)
    by_micro_batch = padded.reshape(steps * dp, micro_batch)[dp_rank::dp]
    example_numbers = examples.reshape(steps * dp, micro_batch)[dp_rank::dp]
    return [batch_of(samples, rows, numbers) for rows, numbers in zip(by_micro_batch, example_numbers, strict=True)]


def batch_of(samples: Samples, indices: NDArray[np.int64], examples: NDArray[np.int64]) -> Batch:
    """The samples ``indices`` as one micro-batch; ``examples``: their numbers in the global batch."""
    rows = samples.rows(indices)
    return Batch(
        tokens=torch.from_numpy(rows.tokens),
        labels=torch.from_numpy(rows.labels),
        positions=torch.from_numpy(rows.positions),
        documents=torch.from_numpy(rows.documents) if samples.masked else None,
        examples=torch.from_numpy(np.ascontiguousarray(examples)),
    )
