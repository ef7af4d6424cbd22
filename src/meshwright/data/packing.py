"""Documents into samples of one sequence length: `stream` (cut) and `best-fit` (packed).

A sample is a row of *pieces*; a piece is a run of consecutive tokens of one document. The target of a token is the
next token of the same document and nothing else, so the last token of a document has none:

    documents   A = a b c d $   B = e f $        ($ ends a document)
    stream, 4   tokens  a b c d | $ e f $        targets  b c d $ | - f $ -
    best-fit, 4 tokens  a b c d | e f . .        targets  b c d $ | f $ - -

`stream` concatenates the documents and cuts every ``length`` tokens. `best-fit` never splits a document that fits:
Best-Fit Decreasing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"), at most 11/9 OPT + 1 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.split import Spans
from meshwright.errors import DataError, InputError

Packing = Literal["stream", "best-fit"]
IGNORE = -100
"""Label of a token that is not counted."""
PADDING = -1
"""Document number of padding, example number of an empty row."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of all samples, in order.

    Attributes:
        begin: ``[pieces]`` first token, an index into the token array.
        size: ``[pieces]`` tokens of the piece.
        end: ``[pieces]`` where its document ends; the target of token i is token i + 1 if that is before it.
        first: ``[samples + 1]`` sample s has the pieces ``first[s]`` to ``first[s + 1] - 1``.
        length: Tokens a sample.
    """

    begin: NDArray[np.int64]
    size: NDArray[np.int64]
    end: NDArray[np.int64]
    first: NDArray[np.int64]
    length: int

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def mixed(self) -> bool:
        """Whether some sample holds more than one document, so that attention must be masked."""
        return bool(len(self) and (np.diff(self.first) > 1).any())


def pack(spans: Spans, length: int, how: Packing) -> Pieces:
    """Samples of ``length`` tokens out of the documents ``spans``.

    Args:
        spans: ``[documents, 2]`` begin and end of each document in the token array.
        length: Tokens a sample.
        how: ``"stream"`` or ``"best-fit"``.

    Raises:
        InputError: ``length`` is not positive or ``how`` unknown.
        DataError: No document has two tokens, so there is nothing to predict.
    """
    if length < 1:
        raise InputError(f"data.sequence_length={length} is not positive; use at least 1")
    if how not in ("stream", "best-fit"):
        raise InputError(f"data.packing='{how}' is unknown; use 'stream' or 'best-fit'")
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans) or int((spans[:, 1] - spans[:, 0]).max()) < 2:
        raise DataError(f"{len(spans)} documents hold no two tokens in a row, so there is nothing to predict")
    return _stream(spans, length) if how == "stream" else _best_fit(spans, length)


def _stream(spans: Spans, length: int) -> Pieces:
    """Cut the concatenated documents every ``length`` tokens; the last sample is padded."""
    sizes = spans[:, 1] - spans[:, 0]
    edges = np.concatenate([[0], np.cumsum(sizes)])
    total = int(edges[-1])
    # a piece begins where a document or a sample does
    cuts = np.arange(0, total, length, dtype=np.int64)
    starts = np.union1d(edges[:-1], cuts)
    document = np.searchsorted(edges, starts, side="right") - 1
    begin = spans[document, 0] + (starts - edges[document])
    size = np.diff(np.append(starts, total))
    first = np.append(np.searchsorted(starts, cuts), len(starts))
    return _without_empty(Pieces(begin, size, spans[document, 1], first.astype(np.int64), length))


def _without_empty(pieces: Pieces) -> Pieces:
    """Leave out samples with no target at all (a last sample that is one end token)."""
    targets = np.minimum(pieces.size, pieces.end - pieces.begin - 1)
    per_sample = np.add.reduceat(targets, pieces.first[:-1])
    keep = per_sample > 0
    if keep.all():
        return pieces
    counts = np.diff(pieces.first)
    chosen = np.repeat(keep, counts)
    first = np.concatenate([[0], np.cumsum(counts[keep])]).astype(np.int64)
    return Pieces(pieces.begin[chosen], pieces.size[chosen], pieces.end[chosen], first, pieces.length)


def _best_fit(spans: Spans, length: int) -> Pieces:
    """Cut long documents into full samples and a rest, then pack the rests, longest first."""
    spans = spans[spans[:, 1] - spans[:, 0] > 1]
    inputs = spans[:, 1] - spans[:, 0] - 1  # the last token of a document predicts nothing, so it is not an input
    chunks = -(-inputs // length)
    document = np.repeat(np.arange(len(spans)), chunks)
    number = np.arange(len(document)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    begin = spans[document, 0] + number * length
    size = np.minimum(length, inputs[document] - number * length)
    bins = best_fit_decreasing(size, length)
    order = np.lexsort((np.arange(len(size)), bins))  # by sample, then by place in the corpus
    counts = np.bincount(bins)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Pieces(begin[order], size[order], spans[document, 1][order], first, length)


def best_fit_decreasing(sizes: Sequence[int] | NDArray[Any], capacity: int) -> NDArray[np.int64]:
    """The bin of each item: items by falling size, each into the fullest open bin that still takes it.

    Ties go to the lower item and to the bin that has had that much room longest. O(items x log capacity): open
    bins are kept in one queue for each amount of free room, and a tree of bits finds the smallest that suffices.

    Args:
        sizes: ``[items]`` sizes, 1 to ``capacity``.
        capacity: Room of a bin.

    Returns:
        ``[items]`` bin numbers from 0, in order of opening.
    """
    items = np.asarray(sizes, np.int64)
    if len(items) and not 1 <= int(items.min()) <= int(items.max()) <= capacity:
        raise InputError(f"an item of {int(items.max())} tokens does not fit a sample of {capacity}; cut it first")
    bins = np.empty(len(items), np.int64)
    free = _FreeRoom(capacity)
    opened = 0
    for item in np.argsort(-items, kind="stable").tolist():
        size = int(items[item])
        room = free.smallest(size)
        if room < 0:
            chosen, opened, room = opened, opened + 1, capacity
        else:
            chosen = free.take(room)
        bins[item] = chosen
        if room > size:
            free.put(room - size, chosen)
    return bins


class _FreeRoom:
    """Open bins by free room, with "the smallest room >= size" in O(log capacity)."""

    def __init__(self, capacity: int) -> None:
        self._leaves = 1 << (capacity + 1).bit_length()
        self._bits = bytearray(2 * self._leaves)  # node i: whether any room below it has a bin
        self._queues: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._heads = [0] * (capacity + 1)

    def put(self, room: int, number: int) -> None:
        self._queues[room].append(number)
        node = room + self._leaves
        while node and not self._bits[node]:
            self._bits[node] = 1
            node >>= 1

    def take(self, room: int) -> int:
        queue, head = self._queues[room], self._heads[room]
        number = queue[head]
        self._heads[room] = head + 1
        if head + 1 == len(queue):
            queue.clear()
            self._heads[room] = 0
            node = room + self._leaves
            self._bits[node] = 0
            while node > 1 and not (self._bits[node] | self._bits[node ^ 1]):
                node >>= 1
                self._bits[node] = 0
        return number

    def smallest(self, size: int) -> int:
        """The smallest room of at least ``size`` that has a bin; -1 if none."""
        node = size + self._leaves
        if self._bits[node]:
            return size
        while node > 1:  # up until there is something to the right, then down its left edge
            if not node & 1 and self._bits[node + 1]:
                node += 1
                break
            node >>= 1
        else:
            return -1
        while node < self._leaves:
            node = 2 * node if self._bits[2 * node] else 2 * node + 1
        return node - self._leaves
