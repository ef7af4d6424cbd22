"""How the processes of the ranks ended, and which of them was the cause."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.recovery.causes import lost_a_peer
from meshwright.recovery.rank import HANDED_OVER, RankRecord

_LINES_SHOWN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one rank ended, from its own record and from what its process returned."""

    rank: int
    state: str
    exit_code: int
    error: str
    time: float
    """Seconds since the epoch: when it reported its failure, or was found to have ended."""
    refusal: bool
    deliberate: bool
    """It ended by a decision, not by accident: another start would end the same."""
    blamed: tuple[int, ...]
    """Ranks that it found to hold corrupt state."""
    good_step: int
    asked: bool
    """After it had been told to end."""
    log: Path

    @classmethod
    def of(cls, rank: int, logs: Path, exit_code: int, seen: float, *, asked: bool = False) -> Ending:
        """What is known of ``rank``, whose process returned ``exit_code`` (below 0: the signal)."""
        record = RankRecord.read(logs, rank)
        failed = record is not None and record.state == "failed"
        return cls(
            rank=rank,
            state="silent" if record is None else record.state,
            exit_code=exit_code,
            error="" if record is None else record.error,
            time=record.time if record is not None and failed else seen,
            refusal=record is not None and failed and record.exit_code == InputError.exit_code,
            deliberate=record is not None and failed and record.deliberate,
            blamed=tuple(record.blamed) if record is not None else (),
            good_step=record.good_step if record is not None else -1,
            asked=asked,
            log=logs / f"rank-{rank}.log",
        )

    def failed(self, stopped_by: signal.Signals | None = None) -> bool:
        """Whether it is a failure; after a signal to all, ending early is not."""
        if self.state in ("done", "stopped"):
            return False  # an abort on the way out, after the work was done and reported
        if self.state == "failed":
            return True
        # Without a signal, a rank that left before reporting has failed, with whatever exit code.
        return stopped_by is None

    @property
    def lost_peer(self) -> bool:
        """It failed because another one was gone."""
        return self.state == "failed" and lost_a_peer(self.error)

    @property
    def blame(self) -> tuple[int, float, int]:
        """Sorts the cause before its consequences: what only lost its peer, and what we ended ourselves."""
        return 2 if self.asked and self.state != "failed" else 1 if self.lost_peer else 0, self.time, self.rank

    @property
    def how(self) -> str:
        """In words: by which signal, or with which exit code."""
        if self.exit_code == HANDED_OVER:
            return "handed over its state"
        if self.exit_code < 0:
            try:
                name = signal.Signals(-self.exit_code).name
            except ValueError:
                name = f"signal {-self.exit_code}"
            return f"killed by {name}"
        return f"exit code {self.exit_code}" + ("" if self.state == "failed" else ", before its work was done")


def failure_block(failed: Sequence[Ending], ranks: int, note: str = "") -> str:
    """The first failure with the end of its log; the others in one line. ``note`` follows the first line's error."""
    first, others = failed[0], failed[1:]
    error = f", {first.error}" if first.error else ""
    headline = f"rank {first.rank} of {ranks} failed: {first.how}{error}{note}"
    lines = [headline, *(f"  | {line}" for line in last_lines(first.log, _LINES_SHOWN)), f"  whole log: {first.log}"]
    if others:
        lines.append("  after it: " + ", ".join(f"rank {ending.rank} ({ending.how})" for ending in others))
    return "\n".join(lines)


def last_lines(path: Path, count: int) -> list[str]:
    """The last ``count`` lines of a text file that are not blank; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
