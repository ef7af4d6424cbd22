"""The progress bar of a tokenisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from meshwright.data.tokenise import Progress as Callback


@contextmanager
def terminal_progress(title: str, stream: TextIO) -> Iterator[Callback | None]:
    """A callback that draws a bar on ``stream``, from its first call on; None where ``stream`` is no terminal."""
    if not stream.isatty():
        yield None
        return
    columns = (TextColumn(title), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(file=stream), transient=True)
    task: TaskID | None = None

    def update(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            bar.start()
            task = bar.add_task(title, total=total)
        bar.update(task, completed=done)

    try:
        yield update
    finally:
        if task is not None:
            bar.stop()
