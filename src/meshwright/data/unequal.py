"""Micro-batches of one replica where the replicas have unequal shares of the global batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.data.batch import Batch, batch_of
from meshwright.data.packing import PADDING
from meshwright.data.samples import Samples
from meshwright.errors import InputError
from meshwright.job.split import Split


def unequal_micro_batches(samples: Samples, indices: NDArray[np.int64], split: Split, replica: int) -> list[Batch]:
    """This replica's micro-batches of one global batch, as many as every other has.

    Args:
        samples: where the rows come from.
        indices: ``[n]`` sample numbers of the global batch; a shorter one (the last validation) leaves places empty.
        split: who takes which places.
        replica: the dp rank.
    """
    size = sum(split.sequences)
    if len(indices) > size:
        raise InputError(f"{len(indices)} samples are more than the global batch of {size} sequences")
    made = []
    for places, rows in zip(split.positions(replica), split.rows(replica), strict=True):
        chosen = np.full(rows, PADDING, np.int64)
        taken = range(places.start, max(places.start, min(places.stop, len(indices))))
        chosen[: len(taken)] = indices[taken.start : taken.stop]
        examples = np.full(rows, PADDING, np.int64)
        examples[: len(taken)] = taken
        made.append(batch_of(samples, chosen, examples))
    return made
