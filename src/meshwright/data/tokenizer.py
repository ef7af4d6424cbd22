"""Tokenizers: bytes, which need nothing installed, and any Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import read_whole
from meshwright.errors import DataError, InputError

Ids = NDArray[np.uint32]

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "<|eot_id|>")
"""Names under which published tokenizers carry their end-of-document token, the first one present is taken."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def size(self) -> int:
        """One more than the largest id it can give."""

    @property
    def end(self) -> int | None:
        """The end-of-document token; None where the tokenizer has none."""

    @property
    def digest(self) -> str:
        """Changes whenever the ids of some text could change."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without special tokens around it."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; the end-of-document token gives nothing."""


class ByteTokenizer:
    """One token a UTF-8 byte, 0 to 255, and 256 for the end of a document."""

    size = 257
    end: int | None = 256
    digest = "bytes-1"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes to text; what is not UTF-8 becomes U+FFFD."""
        return bytes(token for token in ids if 0 <= token < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``, read by the ``tokenizers`` package (extra ``text``).

    Raises:
        DataError: The file is missing or no tokenizer.
        InputError: The package is not installed, or ``end`` is not a token of the file.
    """

    def __init__(self, path: Path, end: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise InputError(
                f"data.tokenizer='{path}' needs the tokenizers package; pip install 'meshwright[text]' or use 'bytes'"
            ) from None
        content = read_whole(path)
        try:
            self._library = Library.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"data.tokenizer='{path}' is not a tokenizer.json: {error}") from None
        self.size = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.size == 0:
            raise DataError(f"data.tokenizer='{path}' has no tokens")
        names = END_NAMES if end is None else (end,)
        found = [token for token in map(self._library.token_to_id, names) if token is not None]
        if end is not None and not found:
            raise InputError(f"data.end_token='{end}' is not a token of '{path}'; use one of its tokens")
        self.end: int | None = found[0] if found else None
        self.digest = hashlib.blake2b(content + repr(self.end).encode(), digest_size=16).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text; the file's own template (``<s>`` and kin) is not applied."""
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens."""
        return str(self._library.decode([int(token) for token in ids], skip_special_tokens=True))


def open_tokenizer(name: str, end: str | None = None) -> Tokenizer:
    """``"bytes"`` or the path of a ``tokenizer.json`` (or of the folder that holds it).

    Args:
        name: What the job says.
        end: The end-of-document token; default the first of `END_NAMES` that the file has.
    """
    if name == "bytes":
        if end is not None:
            raise InputError(f"data.end_token='{end}' is for a tokenizer.json; 'bytes' always ends documents with 256")
        return ByteTokenizer()
    path = Path(name)
    return FileTokenizer(path / "tokenizer.json" if path.is_dir() else path, end)


def check_vocabulary(size: int, vocabulary: int, origin: str) -> None:
    """Refuse ids that the model has no embedding for.

    Args:
        size: One more than the largest id.
        vocabulary: The model's vocabulary.
        origin: What holds the ids, for the message.

    Raises:
        InputError: ``size > vocabulary``.
    """
    if size > vocabulary:
        raise InputError(
            f"{origin} has token ids up to {size - 1} but model.vocabulary={vocabulary}; "
            f"use a vocabulary of at least {size} or another tokenizer"
        )
