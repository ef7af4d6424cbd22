"""Random global batches for proofs: a function of (seed, step), with very unequal numbers of valid tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.batch import Batch, micro_batches
from meshwright.data.packing import IGNORE
from meshwright.data.samples import Rows
from meshwright.data.unequal import unequal_micro_batches
from meshwright.job.split import Split


@dataclass(frozen=True)
class ProofSamples:
    """Samples of random tokens, in place of a corpus.

    ``masked``: several documents a row, and rows whose share of counted labels runs from none to all, so
    that any mean of means shows. Otherwise one document a row and every label counts.
    """

    vocabulary: int
    length: int
    seed: int
    masked: bool

    def __len__(self) -> int:
        return 1 << 30

    def empty(self, rows: int) -> Rows:
        """``rows`` rows of padding."""
        shape = (rows, self.length)
        sequence = np.tile(np.arange(self.length, dtype=np.int64), (rows, 1))
        return Rows(np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64), sequence, np.full(shape, -1, np.int64))

    def rows(self, indices: NDArray[np.int64]) -> Rows:
        """The samples ``indices``; a negative index gives a row of padding."""
        rows = self.empty(len(indices))
        for row, index in enumerate(indices.tolist()):
            if index >= 0:
                self._fill(rows, row, index)
        return rows

    def _fill(self, rows: Rows, row: int, index: int) -> None:
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, index]))
        stream = generator.integers(0, self.vocabulary, self.length + 1)
        rows.tokens[row], rows.labels[row] = stream[:-1], stream[1:]
        rows.documents[row] = 0
        if not self.masked:
            return
        starts = np.zeros(self.length, bool)
        starts[generator.choice(self.length, size=3, replace=False)] = True
        starts[0] = True
        rows.documents[row] = np.cumsum(starts) - 1
        begin = np.maximum.accumulate(np.where(starts, np.arange(self.length), 0))
        rows.positions[row] = np.arange(self.length) - begin
        share = (1.0, 0.02, 0.5, 0.0)[index % 4]
        rows.labels[row][generator.random(self.length) >= share] = IGNORE
        rows.labels[row][:-1][starts[1:]] = IGNORE


def proof_batches(
    samples: ProofSamples, step: int, *, global_size: int, micro_batch: int, dp_rank: int, dp: int,
    split: Split | None = None,
) -> list[Batch]:  # fmt: skip
    """This rank's micro-batches of the global batch of step ``step``; ``split``: where replicas have unequal shares."""
    indices = np.arange(step * global_size, (step + 1) * global_size, dtype=np.int64)
    if split is not None:
        return unequal_micro_batches(samples, indices, split, dp_rank)  # type: ignore[arg-type]
    return micro_batches(samples, indices, global_size, micro_batch, dp_rank, dp)  # type: ignore[arg-type]
