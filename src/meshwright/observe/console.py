"""Where tables are printed."""

from __future__ import annotations

import os

from rich.console import Console

_WIDE = 200
"""Columns of a file or a pipe."""


def table_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that cuts no table off in a file or a pipe, which have no width but ``COLUMNS``."""
    console = Console(stderr=stderr, quiet=quiet)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console
