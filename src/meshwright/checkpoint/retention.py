"""Which checkpoints stay and which go. The last good one never goes before a newer one has been verified."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.checkpoint.delta import freed_by
from meshwright.checkpoint.disk import Disk, forget
from meshwright.checkpoint.folder import CHECKPOINTS, left_overs, put_aside, step_folder, steps
from meshwright.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.checkpoint.verify import damage
from meshwright.errors import CheckpointError

PIN = "pin"
"""A file of this name in a checkpoint's folder keeps it for good."""


@dataclass(frozen=True)
class Retention:
    """What stays: the newest by number, the young, every so many steps, and pinned ones."""

    keep: int
    """Newest checkpoints that stay."""
    every: int | None = None
    """Steps that this divides stay for good."""
    hours: float | None = None
    """Checkpoints written within so many hours stay."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep={self.keep} would remove the last checkpoint; use at least 1")

    def spares(self, path: Path, step: int) -> bool:
        """Whether a checkpoint stays although newer ones are enough."""
        if (path / PIN).exists() or (self.every is not None and step > 0 and step % self.every == 0):
            return True
        return self.hours is not None and time.time() - (path / MANIFEST).stat().st_mtime < 3600 * self.hours


def rotate(folder: str | Path, retention: Retention | int, newest: int, disk: Disk | None = None) -> list[int]:
    """Remove the oldest checkpoints, by number, beyond what ``retention`` keeps up to ``newest``; the removed steps.

    Call it when ``newest`` is committed and verified. It and checkpoints of later steps (left by
    another course of the run) are never removed, nor anything when ``newest`` is not complete.
    """
    disk = disk or Disk()
    retention = Retention(retention) if isinstance(retention, int) else retention
    complete = steps(folder)
    if newest not in complete:
        return []
    old = [step for step in complete if step <= newest][: -retention.keep]
    removed = [step for step in old if not retention.spares(step_folder(folder, step), step)]
    for step in removed:
        forget(put_aside(step_folder(folder, step), "removed", disk), disk)
    return removed


@dataclass
class Pruned:
    """What :func:`prune` did, or would do."""

    kept: list[int] = field(default_factory=list)
    spared: list[int] = field(default_factory=list)
    """Older ones that stay: pinned, young, or of a step that stays for good."""
    removed: list[int] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)
    """Newer ones that do not count, because they are damaged: left where they are, with what is wrong."""
    left_overs: list[str] = field(default_factory=list)
    """Hidden folders removed: of killed removals, broken, and superseded ones."""
    freed_bytes: int = 0
    """Of files that no checkpoint has any more."""


def prune(run: str | Path, retention: Retention, *, dry: bool = False, disk: Disk | None = None) -> Pruned:
    """Keep the newest checkpoints *that verify*, and remove older ones and what was put aside.

    Every checkpoint counted as kept has been read whole first. When none is good, nothing is removed.

    Args:
        run: a run directory, or the folder of its checkpoints.
        retention: what stays.
        dry: only say what would be done.
        disk: the file system.

    Raises:
        CheckpointError: no checkpoint there is good.
    """
    folder = Path(run) / CHECKPOINTS if (Path(run) / CHECKPOINTS).is_dir() else Path(run)
    disk = disk or Disk()
    result = Pruned()
    complete = steps(folder)
    doomed: list[Path] = []
    for step in reversed(complete):
        path = step_folder(folder, step)
        if len(result.kept) < retention.keep:
            problems = damage(read_manifest(path))
            if problems:
                result.damaged[step] = str(problems[0])
            else:
                result.kept.append(step)
        elif retention.spares(path, step):
            result.spared.append(step)
        else:
            result.removed.append(step)
            doomed.append(path)
    if complete and not result.kept:
        raise CheckpointError(f"prune: no checkpoint in {folder} is good, so none is removed; see verify")
    hidden = [path for path in left_overs(folder) if ".tmp-" not in path.name and not (path / PIN).exists()]
    result.left_overs = [path.name for path in hidden]
    result.freed_bytes = freed_by([*doomed, *hidden])
    if not dry:
        for path in [*(put_aside(path, "removed", disk) for path in doomed), *hidden]:
            disk.remove(path)
    return result
