"""Documents out of files: plain text, JSONL and Parquet. (Token files are read by ``megatron.py``.)

Every reader streams: it holds one document at a time, and says where in the file a document is wrong.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.data.files import check_file, unreadable
from meshwright.errors import DataError, InputError, first_line

Format = Literal["text", "jsonl", "parquet", "megatron"]

SUFFIXES: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".bin": "megatron",
    ".idx": "megatron",
}

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """One document; the ``prompt`` before the text is shown to the model but not counted in the loss."""

    text: str
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How files become documents.

    Attributes:
        separator: Plain text: what stands between two documents; default the form feed (page break).
        text_field: JSONL and Parquet: the field with the text.
        prompt_field: JSONL and Parquet: the field with the prompt, masked from the loss.
    """

    separator: str = "\f"
    text_field: str = "text"
    prompt_field: str | None = None


def format_of(path: Path, declared: str = "auto") -> Format:
    """The format of a file: the declared one, or by suffix.

    Raises:
        InputError: The suffix is unknown.
    """
    if declared in ("text", "jsonl", "parquet", "megatron"):
        return declared  # type: ignore[return-value]  # narrowed by the test above
    try:
        return SUFFIXES[path.suffix.lower()]
    except KeyError:
        raise InputError(
            f"'{path}' has the suffix '{path.suffix}'; use one of {', '.join(sorted(SUFFIXES))} or set data.format"
        ) from None


def read_documents(path: Path, options: ReadOptions, declared: str = "auto") -> Iterator[Document]:
    """The documents of one text, JSONL or Parquet file, in order.

    Raises:
        DataError: The file is missing, empty, cut short or malformed; says the line or byte.
        InputError: The format holds tokens instead of text, or needs a package that is not installed.
    """
    check_file(path)
    kind = format_of(path, declared)
    if kind == "text":
        return _text(path, options.separator)
    if kind == "jsonl":
        return _jsonl(path, options)
    if kind == "parquet":
        return _parquet(path, options)
    raise InputError(f"'{path}' holds tokens, not text; it cannot be mixed with text files in one list")


def _decoded(path: Path) -> Iterator[str]:
    """Blocks of text; a byte that is not UTF-8 is named by its position."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    consumed = 0
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(BLOCK_BYTES)
                held = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    position = consumed - held + error.start
                    raise DataError(
                        f"'{path}' is not UTF-8 at byte {position} ({error.reason}); convert the file to UTF-8"
                    ) from None
                consumed += len(block)
                if text:
                    yield text
                if not block:
                    return
    except OSError as error:
        raise DataError(unreadable(path, error)) from None


def _text(path: Path, separator: str) -> Iterator[Document]:
    """Documents between separators, without the line ends around them."""
    if not separator:
        raise InputError("data.separator='' separates nothing; use a non-empty string such as '\\f'")
    rest: list[str] = []
    tail = ""  # the last characters, which may be the start of a separator
    for block in _decoded(path):
        pieces = (tail + block).split(separator)
        if len(pieces) > 1:
            yield Document("".join([*rest, pieces[0]]).strip("\r\n"))
            yield from (Document(piece.strip("\r\n")) for piece in pieces[1:-1])
            rest = []
        keep = len(separator) - 1
        cut = max(0, len(pieces[-1]) - keep)
        rest.append(pieces[-1][:cut])
        tail = pieces[-1][cut:]
    yield Document("".join([*rest, tail]).strip("\r\n"))


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Line number from 1, byte position of the line, the line."""
    position = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield number, position, line
                position += len(line)
    except OSError as error:
        raise DataError(unreadable(path, error)) from None


def _jsonl(path: Path, options: ReadOptions) -> Iterator[Document]:
    for number, position, line in _lines(path):
        where = f"'{path}' line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8").rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where} is not UTF-8 at byte {position + error.start} of the file ({error.reason}); "
                "convert the file to UTF-8"
            ) from None
        except json.JSONDecodeError as error:
            cut = "" if line.endswith(b"\n") else " and the file ends there, so it may be cut short"
            raise DataError(
                f"{where} column {error.colno} is not JSON ({error.msg.lower()}){cut}; "
                "each line must be one JSON object"
            ) from None
        except RecursionError:
            raise DataError(f"{where} is nested too deeply; each line must be one JSON object") from None
        if not isinstance(record, dict):
            raise DataError(f"{where} is a JSON {_json_type(record)}; each line must be one JSON object")
        yield _from_record(record, options, where)


def _from_record(record: dict[str, Any], options: ReadOptions, where: str) -> Document:
    text = _field(record, options.text_field, "data.text_field", where)
    if options.prompt_field is None:
        return Document(text)
    return Document(text, _field(record, options.prompt_field, "data.prompt_field", where))


def _field(record: dict[str, Any], name: str, option: str, where: str) -> str:
    if name not in record:
        present = ", ".join(f"'{key}'" for key in list(record)[:8]) or "none"
        raise DataError(f"{where} has no field '{name}' ({option}); its fields are {present}")
    value = record[name]
    if not isinstance(value, str):
        raise DataError(f"{where} field '{name}' is a JSON {_json_type(value)}; it must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} field '{name}' has half of a surrogate pair at character {error.start}; it must be valid Unicode"
        ) from None
    return value


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "string"


def _parquet(path: Path, options: ReadOptions) -> Iterator[Document]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError(
            f"'{path}' needs the pyarrow package; run pip install 'meshwright[parquet]' or convert it to JSONL"
        ) from None
    columns = [options.text_field] + ([options.prompt_field] if options.prompt_field else [])
    row = 0
    try:
        file = parquet.ParquetFile(path)
        present = file.schema_arrow.names
        for column in columns:
            if column not in present:
                raise DataError(f"'{path}' has no column '{column}'; its columns are {', '.join(present)}")
            kind = file.schema_arrow.field(column).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise DataError(f"'{path}' column '{column}' has the type {kind}; it must be string")
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for record in batch.to_pylist():
                yield _from_record(record, options, f"'{path}' row {row}")
                row += 1
    except (arrow.ArrowException, OSError) as error:
        said = first_line(error).rstrip(".")
        raise DataError(f"'{path}' is not a whole Parquet file after row {row}: {said}") from None
