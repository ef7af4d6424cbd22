"""One failure: who, where, who waited, and the evidence in ``incident-N/``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from meshwright.comm.position import Position
from meshwright.recovery.endings import last_lines
from meshwright.recovery.monitor import Kind

_LOG_LINES = 200
_EVENTS = 50


@dataclass(kw_only=True)
class Incident:
    """What is known of one failure."""

    kind: Kind
    ranks: tuple[int, ...]
    world: int
    sentence: str
    cause: str = ""
    """Its own name where it has one: ``host out of memory``, ``disk full``, ``port in use``."""
    waiters: tuple[int, ...] = ()
    positions: Mapping[int, Position] = field(default_factory=dict)
    detection_seconds: float = 0.0
    """From the last sign of life of the first of its ranks."""
    error: str = ""
    good_step: int | None = None
    """Of corruption: the last step known to be free of it."""

    def last_sign(self, looked: float, now: float) -> float:
        """When a rank to blame last gave a sign of life, in seconds of the positions' clock.

        A dead one lived when it was ``looked`` at last, although it may not have moved for long by then (its start, a
        checkpoint).
        """
        signs = [self.positions[rank].changed for rank in self.ranks if self.positions[rank].changed]
        if self.kind == "dead":
            return max([*signs, looked])
        return min(signs, default=now)

    def to_values(self) -> dict[str, Any]:
        """For JSON."""
        positions = {str(rank): position_values(one) for rank, one in self.positions.items()}
        values = {**asdict(self), "positions": positions}
        return {**values, "ranks": list(self.ranks), "waiters": list(self.waiters)}


def position_values(position: Position) -> dict[str, Any]:
    """Where a rank is, for people and JSON."""
    return {
        "step": position.step, "phase": position.phase, "micro_batch": position.micro_batch,
        "waiting": position.waiting, "operation": position.operation if position.waiting else None,
        "sequence": position.sequence if position.waiting else None,
        "axis": position.axis if position.waiting else None,
        "group": list(position.members) if position.waiting else [],
        "finished": position.finished, "state_step": position.state_step, "process": position.process,
        "started": {axis: position.started[index] for index, (axis, _) in enumerate(position.groups)},
    }  # fmt: skip


def where(position: Position) -> str:
    """Where a rank is, in words."""
    if position.process == 0:
        return "before its first step"
    text = f"in step {position.step}, {'between two phases' if position.phase == 'none' else position.phase}"
    if position.step == 0 and position.phase in ("setup", "none"):
        text = "before its first step"
    if position.phase in ("forward", "backward", "recompute"):
        text += f" of micro-batch {position.micro_batch}"
    if position.waiting:
        text += (
            f", in {position.operation} number {position.sequence} of {position.axis} "
            f"(ranks {', '.join(map(str, position.members))})"
        )
    return text


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 3, 5``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def what_waits(waiters: Sequence[int], positions: Mapping[int, Position]) -> str:
    """Who waits, and in what, in words; empty when nobody does."""
    if not waiters:
        return ""
    said = []
    for rank in waiters:
        position = positions[rank]
        said.append(f"rank {rank} in {position.operation} number {position.sequence} of {position.axis}")
    return f"; waiting for it: {', '.join(said)}"


def gather(folder: Path, incident: Incident, logs: Path, events: Path, ranks: int) -> None:
    """Write the evidence; what cannot be written (a full disk) is left out.

    Args:
        folder: ``incident-N``, new.
        incident: what happened.
        logs: the folder of this attempt's logs and stacks.
        events: the run's ``events.jsonl``.
        ranks: how many there were.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True)
    with contextlib.suppress(OSError):
        (folder / "incident.json").write_text(json.dumps(incident.to_values(), indent=1) + "\n", encoding="utf-8")
    with contextlib.suppress(OSError):
        (folder / "host.json").write_text(json.dumps(_host(folder), indent=1) + "\n", encoding="utf-8")
    with contextlib.suppress(OSError):
        (folder / "events.jsonl").write_text("\n".join(last_lines(events, _EVENTS)) + "\n", encoding="utf-8")
    for rank in range(ranks):
        with contextlib.suppress(OSError):
            (folder / f"rank-{rank}.log").write_text(
                "\n".join(last_lines(logs / f"rank-{rank}.log", _LOG_LINES)) + "\n", encoding="utf-8"
            )
        with contextlib.suppress(OSError):
            if (stack := logs / f"rank-{rank}.stack").stat().st_size:
                shutil.copyfile(stack, folder / stack.name)


def next_folder(run_directory: Path) -> Path:
    """``incident-N`` with the next free N."""
    taken = [
        int(number) for path in run_directory.glob("incident-*") if (number := path.name.partition("-")[2]).isdigit()
    ]
    return run_directory / f"incident-{max(taken, default=0) + 1}"


def _host(folder: Path) -> dict[str, Any]:
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(folder if folder.exists() else folder.parent)
    return {
        "time": time.time(), "memory_available_bytes": memory.available, "memory_total_bytes": memory.total,
        "disk_free_bytes": disk.free, "disk_total_bytes": disk.total, "load": list(os.getloadavg()),
    }  # fmt: skip
