"""Samples by number: the rows of numbers that a model sees, out of the token map and the packing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing import IGNORE, PADDING, Packing, Pieces, pack
from meshwright.data.split import Spans
from meshwright.data.tokens import TokenStore

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Some samples as arrays, each ``[rows, length]``."""

    tokens: Numbers
    labels: Numbers
    positions: Numbers
    documents: Numbers


class Samples:
    """A part of a corpus, cut into samples.

    Attributes:
        length: Tokens a sample.
        masked: Whether attention must be kept inside documents (document masking is on and some sample
            holds more than one document). The same for every batch, so that every batch takes the same path.
    """

    def __init__(
        self,
        store: TokenStore,
        spans: Spans,
        length: int,
        packing: Packing = "stream",
        document_mask: bool = True,
    ) -> None:
        self.store = store
        self.spans = spans
        self.length = length
        self.document_mask = document_mask
        self.pieces: Pieces = pack(spans, length, packing)
        self.masked = document_mask and self.pieces.mixed

    def __len__(self) -> int:
        return len(self.pieces)

    def empty(self, rows: int) -> Rows:
        """``rows`` samples of padding: no label counts, each attends to itself as one document."""
        shape = (rows, self.length)
        return Rows(
            tokens=np.zeros(shape, np.int64),
            labels=np.full(shape, IGNORE, np.int64),
            positions=np.tile(np.arange(self.length, dtype=np.int64), (rows, 1)),
            documents=np.full(shape, PADDING, np.int64),
        )

    def rows(self, indices: NDArray[np.int64]) -> Rows:
        """The samples ``indices``; a negative index gives a row of padding."""
        rows = self.empty(len(indices))
        for row, index in enumerate(indices.tolist()):
            if index >= 0:
                self._fill(rows, row, index)
        return rows

    def _fill(self, rows: Rows, row: int, sample: int) -> None:
        pieces, tokens, counted = self.pieces, self.store.tokens, self.store.counted
        at = 0
        for number, piece in enumerate(range(int(pieces.first[sample]), int(pieces.first[sample + 1]))):
            begin, size, end = int(pieces.begin[piece]), int(pieces.size[piece]), int(pieces.end[piece])
            targets = min(size, end - begin - 1)
            rows.tokens[row, at : at + size] = tokens[begin : begin + size]
            labels = rows.labels[row, at : at + targets]
            labels[:] = tokens[begin + 1 : begin + 1 + targets]
            if counted is not None:
                labels[counted[begin + 1 : begin + 1 + targets] == 0] = IGNORE
            rows.documents[row, at : at + size] = number
            if self.document_mask:
                rows.positions[row, at : at + size] = np.arange(size)
            at += size
        if self.document_mask:
            rows.positions[row, at:] = np.arange(self.length - at)

    def targets(self) -> NDArray[np.int64]:
        """All labels that count in the part, in the order of the corpus: each token but a document's first."""
        tokens, counted = self.store.tokens, self.store.counted
        parts: list[NDArray[np.int64]] = []
        for begin, end in self.spans.tolist():
            part = np.asarray(tokens[begin + 1 : max(end, begin + 1)], np.int64)
            parts.append(part if counted is None else part[counted[begin + 1 : max(end, begin + 1)] != 0])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
