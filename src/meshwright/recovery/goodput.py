"""Where the wall time of a run went, failures included; the parts sum to the wall.

    useful      steps that count, on all ranks
    degraded    what steps that count lost because there were fewer ranks than planned: 1 - ranks / planned
    replayed    steps done again, and the part of a step that a failure cut off
    checkpoint  ranks standing still for a checkpoint
    detection   from a rank's last sign of life (of a dead one: the last look) until its failure was known
    restart     from then until training went on
    idle        before the first step, and after the last
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.comm.position import Position
from meshwright.files import replace_text

Part = Literal["useful", "degraded", "replayed", "checkpoint", "detection", "restart", "idle"]
PARTS: tuple[Part, ...] = ("useful", "degraded", "replayed", "checkpoint", "detection", "restart", "idle")
_TRAINING: tuple[Part, ...] = ("useful", "replayed", "checkpoint")


def part_of(positions: Iterable[Position], *, restarting: bool, replay_until: int) -> Part:
    """What ranks that are there spend their time on.

    Args:
        positions: theirs.
        restarting: a failure is known, and no step was finished since.
        replay_until: the furthest step that was done before the last failure.
    """
    said = list(positions)
    step = max(position.step for position in said)
    if step == 0:
        return "restart" if restarting else "idle"
    if all(position.phase == "end" for position in said):
        return "idle"
    if any(position.phase == "checkpoint" for position in said):
        return "checkpoint"
    return "replayed" if step <= replay_until else "useful"


@dataclass
class Goodput:
    """Charges every moment since ``began`` to one part.

    Args:
        began: seconds of a monotonic clock.
        planned_ranks: of the layout that the run was begun with.
    """

    began: float
    planned_ranks: int
    _pieces: list[tuple[float, float, Part, int]] = field(default_factory=list)
    """Start, end, part, ranks; consecutive."""

    @property
    def until(self) -> float:
        """Up to when it is charged."""
        return self._pieces[-1][1] if self._pieces else self.began

    def charge(self, now: float, part: Part, ranks: int) -> None:
        """The time since the last charge was this."""
        start = self.until
        if now <= start:
            return
        if self._pieces and self._pieces[-1][2:] == (part, ranks):
            self._pieces[-1] = (self._pieces[-1][0], now, part, ranks)
        else:
            self._pieces.append((start, now, part, ranks))

    def recharge(self, start: float, end: float, part: Part, *, only: Sequence[Part] = PARTS) -> None:
        """What was charged between two moments, as one of ``only``, was this instead."""
        changed: list[tuple[float, float, Part, int]] = []
        for begin, stop, was, ranks in self._pieces:
            low, high = max(begin, start), min(stop, end)
            if low >= high or was not in only:
                changed.append((begin, stop, was, ranks))
                continue
            parts = ((begin, low, was), (low, high, part), (high, stop, was))
            changed += [(one, other, what, ranks) for one, other, what in parts if other > one]
        self._pieces = changed

    def failed(self, since: float, last_sign: float, now: float) -> None:
        """A failure is known now: what was trained ``since`` the last finished step, or the ranks' start, is lost.

        What their start itself took stays what it was.
        """
        since = max(since, self.began)
        last_sign = max(last_sign, since)
        self.recharge(since, last_sign, "replayed", only=_TRAINING)
        self.recharge(last_sign, now, "detection")

    def seconds(self) -> dict[str, float]:
        """By part; they sum to the wall."""
        total: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for start, end, part, ranks in self._pieces:
            share = min(1.0, ranks / self.planned_ranks) if part == "useful" else 1.0
            total[part] += (end - start) * share
            total["degraded"] += (end - start) * (1.0 - share)
        return total

    def write(self, path: Path, **facts: Any) -> None:
        """Leave it as JSON: this launch of the run after those before it, and the sum of all."""
        launches = []
        if path.exists():
            launches = json.loads(path.read_text(encoding="utf-8"))["launches"]
        seconds = self.seconds()
        launches.append({"wall_seconds": self.until - self.began, "seconds": seconds, **facts})
        wall = sum(one["wall_seconds"] for one in launches)
        total = {part: sum(one["seconds"][part] for one in launches) for part in PARTS}
        content = {
            "goodput": total["useful"] / wall if wall else None, "wall_seconds": wall, "seconds": total,
            "launches": launches,
        }  # fmt: skip
        replace_text(path, json.dumps(content, indent=1) + "\n")
