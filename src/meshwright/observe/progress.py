"""The one line a person watches: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class StepProgress:
    """Progress of a training run: step, loss, gradient norm, tokens a second, time remaining.

    On a terminal it is a bar; otherwise one line every ``every`` steps. ``shown=False`` (every rank but
    the first) prints nothing.
    """

    def __init__(self, total: int, start: int, *, shown: bool, every: int = 10) -> None:
        self._total, self._start, self._every, self._shown = total, start, every, shown
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._began = time.monotonic()
        if shown and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(file=sys.stdout),
            )
            self._task = self._bar.add_task("", total=total, completed=start)

    def __enter__(self) -> StepProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, *, loss: float, gradient_norm: float, tokens_per_second: float) -> None:
        """Report a finished step."""
        if not self._shown:
            return
        text = f"loss {loss:.4f}  gradient norm {gradient_norm:.3f}  {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step % self._every == 0 or step == self._total or step == self._start + 1:
            elapsed = time.monotonic() - self._began
            remaining = elapsed / max(1, step - self._start) * (self._total - step)
            print(f"step {step}/{self._total}  {text}  {_time(remaining)} left", flush=True)

    def say(self, text: str) -> None:
        """A line beside the bar, from the first rank only."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)


def _time(seconds: float) -> str:
    """Seconds, or of longer times the two largest units: ``90 s``, ``12 min``, ``3 h 20 min``, ``2 d 5 h``."""
    minutes = round(seconds / 60)
    if minutes < 10:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24:,} d {hours % 24} h"
