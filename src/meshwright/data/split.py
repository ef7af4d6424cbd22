"""Which part of a corpus is held out: whole documents, or the tail of a corpus that is one document.

Both parts are lists of *spans* ``[begin, end)`` of the token array, so no token can be in both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError

Spans = NDArray[np.int64]
"""``[documents, 2]``: the first token of a document and the one after its last."""


def validation_documents(count: int, fraction: float) -> NDArray[np.int64]:
    """Indices of the held-out documents: ``round(count * fraction)`` of them, at least one, evenly spaced.

    The choice depends on nothing but its arguments, so every seed and every layout holds out the same documents.
    """
    held_out = min(max(1, round(count * fraction)), count)
    # the middle of each of `held_out` equal stretches, in integers so that no rounding differs between machines
    return (2 * np.arange(held_out, dtype=np.int64) + 1) * count // (2 * held_out)


def split(spans: Spans, fraction: float) -> tuple[Spans, Spans]:
    """Training spans, validation spans.

    A corpus of one document is cut once: its last ``fraction`` of the tokens is held out.

    Raises:
        InputError: ``fraction`` is not in (0, 1), or one part would have no token to predict.
    """
    if not 0.0 < fraction < 1.0:
        raise InputError(f"data.validation={fraction} is no fraction of the documents; use 0 < fraction < 1 or a file")
    if len(spans) == 1:
        begin, end = (int(edge) for edge in spans[0])
        cut = end - max(1, round((end - begin) * fraction))
        training, held_out = np.array([[begin, cut]], np.int64), np.array([[cut, end]], np.int64)
    else:
        chosen = validation_documents(len(spans), fraction)
        keep = np.ones(len(spans), bool)
        keep[chosen] = False
        training, held_out = spans[keep], spans[chosen]
    for part, name in ((training, "training"), (held_out, "validation")):
        if not len(part) or int((part[:, 1] - part[:, 0]).max()) < 2:
            raise InputError(
                f"data.validation={fraction} of {len(spans)} documents leaves the {name} part no token to predict; "
                "use another fraction or give a validation file"
            )
    return training, held_out
