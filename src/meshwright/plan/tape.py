"""A stretch of the program as a tape of bytes taken and given back, and its highest moments in closed form.

``kept`` is what forward leaves for backward (activations), ``used`` all that comes and goes (temporary). The layers of
a stage and the micro-batches of a step repeat, and so do their stretches: the highest moment of ``n`` repetitions lies
in the first or the last of them, because every one moves the level by the same amount.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """What a stretch does to the levels, and its highest moments, all relative to its start; bytes."""

    kept: int
    used: int
    most_kept: int
    most_used: int
    peak: tuple[int, int]
    """(kept, used) at the moment their sum is highest."""


class Tape:
    """Levels while a program runs; ``keep`` and ``free`` activations, ``use`` and ``drop`` temporary bytes."""

    def __init__(self, kept: int = 0, used: int = 0) -> None:
        self.kept, self.used = kept, used
        self.most_kept, self.most_used = kept, used
        self.peak = (kept, used)
        self.saving = True
        """Whether what is kept stays for backward; not while a part runs that is recomputed later."""

    def keep(self, *sizes: int) -> None:
        """Allocate activations, one after the other."""
        if not self.saving:
            self.use(*sizes)
            return
        self.kept += sum(sizes)
        self.most_kept = max(self.most_kept, self.kept)
        self._peaked()

    def free(self, *sizes: int) -> None:
        """Give activations back."""
        self.kept -= sum(sizes)

    def use(self, *sizes: int) -> None:
        """Allocate temporary bytes, one after the other."""
        self.used += sum(sizes)
        self.most_used = max(self.most_used, self.used)
        self._peaked()

    @contextmanager
    def forgetting(self, result: int) -> Iterator[None]:
        """Run a part of which only ``result`` bytes stay, as if it saved nothing; as temporary bytes."""
        saving, before = self.saving, self.used
        self.saving = False
        yield
        self.saving = saving
        self.used = before + result

    def drop(self, *sizes: int) -> None:
        """Give temporary bytes back."""
        self.used -= sum(sizes)

    def touch(self, *sizes: int) -> None:
        """Use for a moment."""
        self.use(*sizes)
        self.drop(*sizes)

    def play(self, stretch: Stretch, times: int = 1) -> None:
        """Run a stretch so many times in a row."""
        if times < 1:
            return
        for before in (0, times - 1):
            kept, used = self.kept + before * stretch.kept, self.used + before * stretch.used
            self.most_kept = max(self.most_kept, kept + stretch.most_kept)
            self.most_used = max(self.most_used, used + stretch.most_used)
            there = (kept + stretch.peak[0], used + stretch.peak[1])
            if sum(there) > sum(self.peak):
                self.peak = there
        self.kept += times * stretch.kept
        self.used += times * stretch.used

    def restart(self) -> None:
        """Look for the highest moments from here on; the levels stay."""
        self.most_kept, self.most_used, self.peak = self.kept, self.used, (self.kept, self.used)

    def stretch(self) -> Stretch:
        """Everything so far, of a tape that started at zero."""
        return Stretch(self.kept, self.used, self.most_kept, self.most_used, self.peak)

    def _peaked(self) -> None:
        if self.kept + self.used > sum(self.peak):
            self.peak = (self.kept, self.used)
