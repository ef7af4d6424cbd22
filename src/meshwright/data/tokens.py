"""Tokenised corpora on disk, opened as memory maps.

A store is a folder: ``tokens.bin`` (uint16 or uint32), ``ends.bin`` (int64, where each document ends),
``counted.bin`` (uint8 a token, 0 = part of a prompt; only where there are prompts) and ``meta.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.split import Spans
from meshwright.errors import DataError

FORMAT = 1


@dataclass(frozen=True)
class TokenStore:
    """Tokens of all documents, one after another.

    Attributes:
        tokens: ``[tokens]`` ids.
        spans: ``[documents, 2]`` first token and the one after the last; the end token, if any, is inside.
        counted: ``[tokens]`` uint8, 0 where a token is never a target; None when all are.
        size: One more than the largest id that the tokens can hold.
        end: The end-of-document token, or None.
        digest: Of the content and of everything that shaped it.
        origin: What to call it in messages.
        seconds: Time spent tokenising, in this process, now; 0.0 when it was there already.
        empty_documents: Documents without any token, which were left out.
    """

    tokens: NDArray[Any]
    spans: Spans
    counted: NDArray[np.uint8] | None
    size: int
    end: int | None
    digest: str
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
            digest=folder.name,
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
