"""Tokenised corpora on disk, opened as memory maps.

A store is a folder: ``tokens.bin`` (uint16 or uint32), ``ends.bin`` (int64, where each document ends),
``counted.bin`` (uint8 a token, 0 = part of a prompt; only where there are prompts) and ``meta.json``.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.split import Spans
from meshwright.errors import DataError

FORMAT = 1


class TokenArray(Protocol):
    """What is needed of ``[tokens]`` ids: a length and slices."""

    def __len__(self) -> int:
        """How many tokens there are."""

    def __getitem__(self, part: slice, /) -> NDArray[Any]:
        """The tokens of a slice with begin and end."""


@dataclass(frozen=True)
class TokenStore:
    """Tokens of all documents, one after another.

    Attributes:
        tokens: ``[tokens]`` ids.
        spans: ``[documents, 2]`` first token and the one after the last; the end token, if any, is inside.
        counted: ``[tokens]`` uint8, 0 where a token is never a target; None when all are.
        size: One more than the largest id that the tokens can hold.
        end: The end-of-document token, or None.
        origin: What to call it in messages.
        seconds: Spent now on tokenising, or on waiting for the process that did; 0.0 when it was there already.
        empty_documents: Documents without any token, which were left out.
    """

    tokens: TokenArray
    spans: Spans
    counted: TokenArray | None
    size: int
    end: int | None
    origin: str
    seconds: float = 0.0
    empty_documents: int = 0


def open_store(folder: Path, seconds: float = 0.0) -> TokenStore:
    """Open a store that `tokenise` finished.

    Raises:
        DataError: A file of it is missing or has another length than the store says.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        count, documents = int(meta["tokens"]), int(meta["documents"])
        tokens = _map(folder / "tokens.bin", np.dtype(meta["dtype"]), count)
        ends = _map(folder / "ends.bin", np.dtype("<i8"), documents)
        counted = _map(folder / "counted.bin", np.dtype("u1"), count) if meta["prompts"] else None
        spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1).astype(np.int64)
        return TokenStore(
            tokens=tokens,
            spans=spans,
            counted=counted,
            size=int(meta["size"]),
            end=meta["end"],
            origin=str(meta["origin"]),
            seconds=seconds,
            empty_documents=int(meta["empty_documents"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the token cache '{folder}' is damaged ({error}); delete it to tokenise again") from None


def _map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    size = path.stat().st_size
    if size != count * dtype.itemsize:
        raise ValueError(f"{path.name} has {size} bytes instead of {count * dtype.itemsize}")
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


class _Joined:
    """Arrays one after another; a slice must lie in one of them, as every document does."""

    def __init__(self, parts: Sequence[TokenArray]) -> None:
        self._parts = parts
        self._edges = [0]
        for part in parts:
            self._edges.append(self._edges[-1] + len(part))

    def __len__(self) -> int:
        return self._edges[-1]

    def __getitem__(self, part: slice, /) -> NDArray[Any]:
        if part.start >= part.stop:
            return self._parts[0][0:0]
        number = bisect.bisect_right(self._edges, part.start) - 1
        offset = self._edges[number]
        if part.stop > self._edges[number + 1]:
            raise IndexError(f"tokens {part.start} to {part.stop} lie in more than one file")
        return self._parts[number][part.start - offset : part.stop - offset]


def join(stores: Sequence[TokenStore]) -> TokenStore:
    """Several stores as one, without copying tokens."""
    if len(stores) == 1:
        return stores[0]
    offsets = np.cumsum([0, *(len(store.tokens) for store in stores)])
    spans = np.concatenate([store.spans + offset for store, offset in zip(stores, offsets, strict=False)])
    counted = None
    if any(store.counted is not None for store in stores):
        ones = [np.broadcast_to(np.uint8(1), (len(store.tokens),)) for store in stores]
        counted = _Joined(
            [one if store.counted is None else store.counted for store, one in zip(stores, ones, strict=True)]
        )
    return TokenStore(
        tokens=_Joined([store.tokens for store in stores]),
        spans=spans,
        counted=counted,
        size=max(store.size for store in stores),
        end=next((store.end for store in stores if store.end is not None), None),
        origin=" and ".join(store.origin for store in stores),
        seconds=sum(store.seconds for store in stores),
        empty_documents=sum(store.empty_documents for store in stores),
    )


def unigram_entropy(tokens: NDArray[Any]) -> float:
    """Entropy in nats of the token frequencies: the loss of the best model that looks at no context.

    Args:
        tokens: ``[tokens]`` ids.
    """
    if not len(tokens):
        return 0.0
    counts = np.bincount(np.asarray(tokens, np.int64)).astype(np.float64)
    share = counts[counts > 0] / len(tokens)
    return float(-(share * np.log(share)).sum())
