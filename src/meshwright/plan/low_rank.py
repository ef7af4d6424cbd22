"""How much of a rank's gradients travels when its matrices are sent as two thin factors, for arrays of layouts.

A matrix of a rows and b columns is sent as P, ``a r``, and Q, ``b r``, where ``(a + b) r saving <= a b``; all else
travels whole, beside every P. Vogels et al., "PowerSGD", NeurIPS 2019. The exact form, buffer by buffer, is in
``compressed``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.job.sync_section import SyncSection
from meshwright.plan.arrays import Floats, Ints, Layouts
from meshwright.plan.shape import Shape, Value
from meshwright.plan.stages import Held


def low_rank_parts(
    shape: Shape, layouts: Layouts, sync: SyncSection, ranks: Sequence[Held], parts: Ints
) -> tuple[Floats, Floats]:
    """Elements of the two sums over the elements of the gradients, on the pipeline rank that holds most.

    Args:
        shape: sizes of the model.
        layouts: columns.
        sync: its ``compression_rank`` and ``compression_least_saving``.
        ranks: what pipeline ranks hold.
        parts: by how many ranks the rows of a matrix are cut (ZeRO-2 and 3).
    """
    tp, hidden = layouts.tp, shape.hidden
    query, ffn = shape.query / tp, shape.ffn / tp
    layer = _sum(
        [
            _factors(query + 2 * shape.key_value / tp, hidden, sync, parts),
            _factors(hidden, query, sync, parts),
            _factors((1 + shape.gated) * ffn, hidden, sync, parts),
            _factors(hidden, ffn, sync, parts),
        ]
    )
    layer = (layer[0] + shape.whole_parameters() + shape.biases / tp, layer[1])
    end = _factors(np.ceil(shape.vocabulary / tp), hidden, sync, parts)
    end_size = np.ceil(shape.vocabulary / tp) * hidden
    layer_size = shape.split_parameters() / tp + shape.whole_parameters()
    sizes, firsts, seconds = [], [], []
    for rank in ranks:
        ends = 1.0 * rank.embedding + rank.head * (1.0 - shape.tied * rank.embedding)
        sizes.append(rank.layers * layer_size + ends * end_size)
        firsts.append(rank.layers * layer[0] + ends * end[0])
        seconds.append(rank.layers * layer[1] + ends * end[1])
    which = np.argmax(np.stack(sizes), axis=0)
    size = np.choose(which, sizes)
    return np.asarray(np.choose(which, firsts) / size), np.asarray(np.choose(which, seconds) / size)


def _factors(rows: Value, columns: Value, sync: SyncSection, parts: Ints) -> tuple[Floats, Floats]:
    """Elements of P (or of the matrix, where it travels whole) and of Q, of all parts of one matrix."""
    a, b = np.ceil(np.asarray(rows / parts, float)), np.asarray(columns, float)
    r = np.minimum(sync.compression_rank, np.minimum(a, b))
    saves = (a + b) * r * sync.compression_least_saving <= a * b
    return np.asarray(parts * np.where(saves, a * r, a * b)), np.asarray(parts * np.where(saves, b * r, 0.0))


def _sum(pairs: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    first, second = pairs[0]
    for more, again in pairs[1:]:
        first, second = first + more, second + again
    return first, second
