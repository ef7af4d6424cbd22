"""Where a command writes: refused before anything is computed, and never over what is not its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwright.errors import InputError
from meshwright.files import folder_problem


def check_out(out: Path, suffix: str, kind: str, is_ours: Callable[[Path], bool] | None = None) -> Path:
    """``out``, if it ends in ``suffix``, can be written and holds nothing else.

    Args:
        out: the file to write; one that is there is replaced.
        suffix: with its dot; what the program reads ends in another, or ``is_ours`` tells it apart.
        kind: what is written, as in "a report".
        is_ours: whether a file that is there is of that kind.

    Raises:
        InputError: it is a directory, is not so named, cannot be written, or another file would be lost.
    """
    if out.is_dir():
        raise InputError(f"--out: {out} is a directory; give a file, for example {out / ('new' + suffix)}")
    if out.suffix != suffix:
        raise InputError(f"--out: {out} must end in {suffix}, as {kind} does; give for example {out.stem}{suffix}")
    if not out.parent.is_dir():
        raise InputError(f"--out: the directory {out.parent} does not exist; make it first or give another file")
    if problem := folder_problem(out.parent):
        raise InputError(f"--out: {out} cannot be written ({problem}); give a file in a directory you may write")
    if out.exists() and is_ours is not None and not is_ours(out):
        raise InputError(f"--out: {out} is there and is not {kind}, so it is not replaced; give another file")
    return out
