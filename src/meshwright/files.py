"""Files that a reader finds whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) beside ``path`` and put it in its place in one step."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def folder_problem(folder: Path) -> str | None:
    """Why nothing can be written in ``folder``, there or to be made, in the system's words; None: it can.

    Nothing is left behind: what would have to be made is not.
    """
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return error.strerror or str(error)
