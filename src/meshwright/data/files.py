"""Opening the files a job names; every failure is one sentence with the path."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import DataError


def read_whole(path: Path) -> bytes:
    """The content of a small file.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(unreadable(path, error)) from None


def unreadable(path: Path, error: OSError) -> str:
    """The sentence for a file that cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        return f"'{path}' does not exist; give the path of a file that can be read"
    if isinstance(error, IsADirectoryError):
        return f"'{path}' is a folder; give the path of a file"
    return f"'{path}' cannot be read: {(error.strerror or str(error)).lower()}"


def expand(entries: str | Path | Sequence[str | Path], folder: Path | None = None) -> list[Path]:
    """The files that paths and glob patterns name, in order; a pattern's matches sorted by name.

    Args:
        entries: One or several paths or patterns.
        folder: What relative entries are relative to; default the current folder.

    Raises:
        DataError: A pattern matches nothing, a file is missing or empty, or there is no entry.
    """
    listed = [entries] if isinstance(entries, (str, Path)) else list(entries)
    found: list[Path] = []
    for entry in listed:
        path = Path(entry).expanduser()
        path = path if folder is None or path.is_absolute() else folder / path
        if glob.has_magic(str(path)) and not path.exists():
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
            if not matches:
                raise DataError(f"no file matches '{path}'; give a path or pattern of existing files")
            found.extend(matches)
        else:
            found.append(path)
    if not found:
        raise DataError("the list of data files is empty; name at least one file")
    for path in found:
        check_file(path)
    return found


def check_file(path: Path) -> None:
    """Refuse a file that is missing, a folder, not readable or empty.

    Raises:
        DataError: With the path and what is wrong.
    """
    try:
        with path.open("rb") as file:
            first = file.read(1)
    except OSError as error:
        raise DataError(unreadable(path, error)) from None
    if not first:
        raise DataError(f"'{path}' is empty (0 bytes); a data file holds at least one document")
