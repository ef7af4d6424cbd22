"""Megatron-LM's indexed token files, ``NAME.bin`` and ``NAME.idx``, read and written.

``NAME.bin`` is nothing but token ids. ``NAME.idx``, all little-endian:

    bytes 0-8    "MMIDIDX" and two zero bytes
    bytes 9-16   version, uint64, 1
    byte  17     type of the ids: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16 (6, 7: floats, not tokens)
    bytes 18-25  number of sequences S, uint64
    bytes 26-33  length D of the document index, uint64: one more than there are documents
    then         S x int32 sequence lengths in tokens
    then         S x int64 where each sequence begins in the .bin, in bytes
    then         D x int64 document index: document d is the sequences index[d] to index[d + 1] - 1
    then maybe   S x int8 modes of multimodal sets, which are not read
"""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import check_file, unreadable
from meshwright.data.split import Spans
from meshwright.data.tokens import TokenStore
from meshwright.errors import DataError, InputError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
SCAN_TOKENS = 1 << 24


def read_megatron(path: Path) -> TokenStore:
    """Open ``path`` (the ``.bin`` or the ``.idx``) as a token store; the tokens stay on disk.

    Raises:
        DataError: A file of the two is missing, empty, cut short or malformed; says the byte.
    """
    binary, index = path.with_suffix(".bin"), path.with_suffix(".idx")
    check_file(index)
    check_file(binary)
    dtype, lengths, pointers, documents = _read_index(index)
    size = binary.stat().st_size
    if size % dtype.itemsize:
        raise DataError(
            f"'{binary}' has {size} bytes, not a multiple of the {dtype.itemsize} of one {dtype.name} token"
        )
    ends = pointers + lengths.astype(np.int64) * dtype.itemsize
    beyond = np.flatnonzero((pointers < 0) | (lengths < 0) | (ends > size) | (pointers % dtype.itemsize != 0))
    if len(beyond):
        first = int(beyond[0])
        raise DataError(
            f"'{binary}' has {size} bytes but sequence {first} of '{index}' is {int(lengths[first])} tokens at byte "
            f"{int(pointers[first])}; the .bin is cut short or belongs to another .idx"
        )
    tokens = np.memmap(binary, dtype, "r", shape=(size // dtype.itemsize,))
    spans = _spans(index, documents, pointers // dtype.itemsize, ends // dtype.itemsize)
    if not len(spans):
        raise DataError(f"'{index}' has no document with a token in it; give at least one")
    return TokenStore(
        tokens=tokens,
        spans=spans,
        counted=None,
        size=1 + _largest(binary, tokens),
        end=None,
        origin=f"'{binary}'",
        empty_documents=len(documents) - 1 - len(spans),
    )


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Type of the ids, sequence lengths in tokens, sequence begins in bytes, document index."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(unreadable(path, error)) from None
    if content[: len(MAGIC)] != MAGIC[: len(content)]:
        raise DataError(f"'{path}' does not begin with the bytes {MAGIC!r}, so it is no Megatron .idx")
    if len(content) < HEADER.size:
        raise DataError(f"'{path}' ends at byte {len(content)}, inside the header of {HEADER.size} bytes")
    _, version, code, sequences, entries = HEADER.unpack_from(content)
    if version != 1:
        raise DataError(f"'{path}' has the version {version} at byte 9; only version 1 can be read")
    if code not in DTYPES:
        legal = ", ".join(f"{number} ({np.dtype(name).name})" for number, name in DTYPES.items())
        raise DataError(f"'{path}' has the type code {code} at byte 17; use one of {legal}")
    needed = HEADER.size + sequences * 12 + entries * 8
    if len(content) < needed:
        raise DataError(
            f"'{path}' ends at byte {len(content)}, but {sequences} sequences and {entries} entries need {needed}"
        )
    at = HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, at)
    pointers = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(content, "<i8", entries, at + 12 * sequences)
    wrong = np.flatnonzero(np.diff(documents) < 0)
    if not entries or documents[0] != 0 or documents[-1] != sequences or len(wrong):
        entry = int(wrong[0]) + 1 if len(wrong) else 0
        raise DataError(
            f"'{path}' has a document index at byte {at + 12 * sequences + 8 * entry} that does not rise "
            f"from 0 to the {sequences} sequences"
        )
    return np.dtype(DTYPES[code]), lengths, pointers, documents


def _spans(path: Path, documents: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Spans:
    """First token and the one after the last of each document that is not empty."""
    inside = np.ones(len(begins), bool)  # sequences that go on where the one before them ended
    inside[documents[:-1][documents[:-1] < len(begins)]] = False
    gaps = np.flatnonzero(inside[1:] & (begins[1:] != ends[:-1])) + 1
    if len(gaps):
        raise DataError(
            f"'{path}' puts sequence {int(gaps[0])} away from the rest of its document; "
            "the sequences of a document must follow each other in the .bin"
        )
    full = documents[1:] > documents[:-1]
    spans = np.stack([begins[documents[:-1][full]], ends[documents[1:][full] - 1]], axis=1)
    return spans[spans[:, 1] > spans[:, 0]]


def _largest(path: Path, tokens: NDArray[Any]) -> int:
    """The largest id; the whole file is read once, in parts."""
    largest = 0
    for begin in range(0, len(tokens), SCAN_TOKENS):
        part = tokens[begin : begin + SCAN_TOKENS]
        if int(part.min()) < 0:
            position = begin + int(np.flatnonzero(part < 0)[0])
            raise DataError(
                f"'{path}' has the id {int(tokens[position])} at byte {position * tokens.itemsize}; ids start at 0"
            )
        largest = max(largest, int(part.max()))
    return largest


def write_megatron(path: Path, documents: Iterable[NDArray[Any]], dtype: str = "uint16") -> None:
    """Write documents, one sequence each, as Megatron's preprocessing does.

    The ``.idx`` is renamed into place last, so a pair with an ``.idx`` is whole.

    Args:
        path: With or without ``.bin``.
        documents: ``[tokens]`` ids of each document.
        dtype: One of uint8, int8, int16, int32, int64, uint16.

    Raises:
        InputError: An id does not fit ``dtype``, or there is no such type.
    """
    kind = _dtype(dtype)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    binary, index = prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")
    mark = uuid.uuid4().hex[:8]
    partial = [file.with_name(f"{file.name}.partial-{mark}") for file in (binary, index)]
    limit = np.iinfo(kind)
    lengths: list[int] = []
    try:
        with partial[0].open("wb") as file:
            for number, ids in enumerate(documents):
                if len(ids) and not limit.min <= int(ids.min()) <= int(ids.max()) <= limit.max:
                    raise InputError(
                        f"document {number} has ids from {int(ids.min())} to {int(ids.max())}, but {dtype} holds "
                        f"{limit.min} to {limit.max}; use a wider type"
                    )
                file.write(ids.astype(kind).tobytes())
                lengths.append(len(ids))
            _to_disk(file)
        with partial[1].open("wb") as file:
            _write_index(file, kind, lengths)
            _to_disk(file)
        index.unlink(missing_ok=True)
        partial[0].replace(binary)
        partial[1].replace(index)
    finally:
        for left in partial:
            left.unlink(missing_ok=True)


def _dtype(name: str) -> np.dtype[Any]:
    legal = sorted(np.dtype(known).name for known in DTYPES.values())
    if name not in legal:
        raise InputError(f"the token type '{name}' is unknown; use one of {', '.join(legal)}")
    return np.dtype(name).newbyteorder("<")


def _write_index(file: IO[bytes], dtype: np.dtype[Any], lengths: list[int]) -> None:
    sizes = np.array(lengths, np.int64)
    begins = (np.cumsum(sizes) - sizes) * dtype.itemsize
    file.write(HEADER.pack(MAGIC, 1, CODES[dtype], len(lengths), len(lengths) + 1))
    file.write(sizes.astype("<i4").tobytes())
    file.write(begins.astype("<i8").tobytes())
    file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
