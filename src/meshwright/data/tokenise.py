"""Tokenise a corpus once, into a cache folder that every later run and every rank maps into memory.

The folder's name is a digest of the files' content, the tokenizer and the reading options, so a changed corpus
is never taken for the old one. It is written under a temporary name and renamed when it is whole: a killed
tokenisation leaves nothing that could be taken. Of several processes one writes; the others wait for it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from meshwright.data.corpus import Document, ReadOptions, format_of, read_documents
from meshwright.data.files import check_file, unreadable
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.tokens import FORMAT, TokenStore, open_store
from meshwright.errors import DataError, InputError

Progress = Callable[[int, int], None]
"""Called with the bytes of text done and the bytes of all files."""

BATCH_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at once, so that it can use its threads."""


def tokenise(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    cache: Path,
    options: ReadOptions | None = None,
    declared: str = "auto",
    progress: Progress | None = None,
) -> TokenStore:
    """The tokens of ``files``: from the cache, or tokenised into it now.

    Args:
        files: Text, JSONL or Parquet, in the order of their documents.
        tokenizer: Gives the ids; its end token, if it has one, ends each document.
        cache: Folder for token stores; made if missing. Put it on storage that all hosts share, or one a host.
        options: How files become documents.
        declared: The format, or ``"auto"`` for by suffix.
        progress: Called now and then while tokenising; not called when the cache has it.

    Raises:
        DataError: A file is missing or malformed, or there is no document with a token in them.
        InputError: The cache folder cannot be written.
    """
    options = options or ReadOptions()
    for path in files:
        check_file(path)
    digest = content_digest(files, tokenizer, options, declared)
    final = cache / digest
    if (final / "meta.json").exists():
        return open_store(final)
    started = time.perf_counter()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{digest}.lock") as alone:
            if (final / "meta.json").exists():  # another process made it while this one waited
                return open_store(final, time.perf_counter() - started)
            if alone:
                for left_over in cache.glob(f"{digest}.partial-*"):  # of a killed process
                    shutil.rmtree(left_over, ignore_errors=True)
            _write(files, tokenizer, options, declared, final, progress)
            return open_store(final, time.perf_counter() - started)
    except OSError as error:
        raise InputError(
            f"the token cache '{cache}' cannot be written ({(error.strerror or str(error)).lower()}); "
            "set data.cache to a folder that can"
        ) from None


def content_digest(files: Sequence[Path], tokenizer: Tokenizer, options: ReadOptions, declared: str) -> str:
    """Hexadecimal digest of everything that shapes the tokens; not of where the files lie."""
    total = hashlib.blake2b(digest_size=16)
    shape = [FORMAT, tokenizer.digest, tokenizer.size, tokenizer.end, options.separator, options.text_field]
    total.update(json.dumps([*shape, options.prompt_field]).encode())
    for path in files:
        try:
            with path.open("rb") as file:
                one = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        except OSError as error:
            raise DataError(unreadable(path, error)) from None
        total.update(format_of(path, declared).encode() + one.digest())
    return total.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold ``path`` alone; the kernel lets go when the holder dies. Gives False where locks do not exist.

    Without locks several processes may tokenise the same corpus; the rename still keeps each result whole.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            held = False
        yield held


def _write(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    options: ReadOptions,
    declared: str,
    final: Path,
    progress: Progress | None,
) -> None:
    partial = final.parent / f"{final.name}.partial-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    try:
        _fill(partial, files, tokenizer, options, declared, progress)
        try:
            partial.rename(final)
        except OSError as error:
            # a process that could not lock finished the same store first
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(
    folder: Path,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    options: ReadOptions,
    declared: str,
    progress: Progress | None,
) -> None:
    dtype = np.dtype("<u2" if tokenizer.size <= 1 << 16 else "<u4")
    total = sum(path.stat().st_size for path in files)
    done = empty = count = 0
    ends: list[int] = []
    prompts = options.prompt_field is not None
    with (folder / "tokens.bin").open("wb") as tokens, _maybe(folder / "counted.bin", prompts) as counted:
        for path in files:
            for batch in _batches(read_documents(path, options, declared)):
                texts = tokenizer.encode([document.text for document in batch])
                heads = tokenizer.encode([document.prompt for document in batch]) if prompts else [None] * len(batch)
                for text, head in zip(texts, heads, strict=True):
                    prompt = 0 if head is None else len(head)
                    if not len(text) + prompt:
                        empty += 1
                        continue
                    parts = [text] if head is None else [head, text]
                    if tokenizer.end is not None:
                        parts.append(np.array([tokenizer.end], np.uint32))
                    ids = np.concatenate(parts)
                    tokens.write(ids.astype(dtype).tobytes())
                    if counted is not None:
                        counted.write(bytes(prompt) + b"\x01" * (len(ids) - prompt))
                    count += len(ids)
                    ends.append(count)
                done += sum(len(document.text) + len(document.prompt) for document in batch)
                if progress is not None:
                    progress(min(done, total), total)
        for stream in (tokens, counted):
            if stream is not None:
                stream.flush()
                os.fsync(stream.fileno())
    if not ends:
        raise DataError(f"{_named(files)} has no document with any text in it; give at least one")
    (folder / "ends.bin").write_bytes(np.array(ends, "<i8").tobytes())
    meta = {
        "format": FORMAT,
        "dtype": dtype.str,
        "tokens": count,
        "documents": len(ends),
        "empty_documents": empty,
        "prompts": prompts,
        "size": tokenizer.size,
        "end": tokenizer.end,
        "origin": _named(files),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
    if progress is not None:
        progress(total, total)


@contextmanager
def _maybe(path: Path, wanted: bool) -> Iterator[IO[bytes] | None]:
    if not wanted:
        yield None
        return
    with path.open("wb") as file:
        yield file


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text) + len(document.prompt)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _named(files: Sequence[Path]) -> str:
    first = f"'{files[0]}'"
    return first if len(files) == 1 else f"{first} and {len(files) - 1} more files"
