"""The folder of a run's checkpoints: which there are, and which is the last."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from meshwright.checkpoint.disk import Disk, forget
from meshwright.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""
_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_LEFT_OVER = re.compile(r"\.step-[0-9]+\.(tmp|removed|broken|superseded)-[0-9a-f]+")


def step_folder(folder: str | Path, step: int) -> Path:
    """Where the checkpoint of ``step`` stands."""
    return Path(folder) / f"step-{step}"


def steps(folder: str | Path) -> list[int]:
    """The steps that have a complete checkpoint in ``folder``, by number.

    A folder without a valid manifest, or with files missing or cut short, does not exist.
    """
    found = []
    for path in Path(folder).glob("step-*"):
        if (match := _NAME.fullmatch(path.name)) and is_complete(path):
            found.append(int(match.group(1)))
    return sorted(found)


def not_counted(folder: str | Path) -> dict[int, CheckpointError]:
    """By step, why a ``step-N`` folder is not among ``steps``: damaged, or not for this program to read."""
    found = {}
    for path in Path(folder).glob("step-*"):
        if _NAME.fullmatch(path.name):
            try:
                read_manifest(path)
            except CheckpointError as error:
                found[step_of(path)] = error
    return found


def is_complete(path: str | Path) -> bool:
    """Whether ``path`` is a checkpoint with a valid manifest and all its files in full size."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def latest(folder: str | Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    found = steps(folder)
    return step_folder(folder, found[-1]) if found else None


def checkpoints_at(path: str | Path) -> list[Path]:
    """The checkpoints that ``path`` means: itself, or all of a run (or of its folder ``checkpoints``), by step.

    Incomplete ones are among them, and ``path`` itself where it has none: reading it says what it seems to be.

    Raises:
        CheckpointError: a run without a checkpoint, or a folder that may not be read.
    """
    path = Path(path)
    try:
        if not (path / MANIFEST).exists() and not _NAME.fullmatch(path.name):
            for folder in (path / CHECKPOINTS, path):
                found = [each for each in folder.glob("step-*") if _NAME.fullmatch(each.name) and each.is_dir()]
                if found:
                    return sorted(found, key=step_of)
            if (path / CHECKPOINTS).is_dir():
                raise CheckpointError(f"checkpoint: {path / CHECKPOINTS} has no checkpoint; give a run that has one")
    except PermissionError as error:
        raise CheckpointError(
            f"checkpoint: {error.filename or path} may not be read; give a folder that you may read"
        ) from None
    return [path]


def step_of(path: Path) -> int:
    """The step in the name ``step-N``."""
    return int(path.name.removeprefix("step-"))


def left_overs(folder: str | Path) -> list[Path]:
    """Hidden folders that are no checkpoints: unfinished saves and removals, broken and superseded ones."""
    return sorted(path for path in Path(folder).glob(".step-*") if _LEFT_OVER.fullmatch(path.name))


def put_aside(path: Path, why: str, disk: Disk) -> Path:
    """Take a checkpoint's name away from it, at once: hidden, it does not exist any more. Its new path."""
    hidden = path.with_name(f".{path.name}.{why}-{secrets.token_hex(4)}")
    disk.rename(path, hidden)
    return hidden


def supersede_later(folder: str | Path, step: int, disk: Disk | None = None) -> list[int]:
    """Put aside all complete checkpoints of later steps than ``step``: a run that goes on from it takes another course.

    They are hidden, not destroyed; ``prune`` removes them. Returns their steps.
    """
    disk = disk or Disk()
    later = [found for found in steps(folder) if found > step]
    for found in later:
        put_aside(step_folder(folder, found), "superseded", disk)
    if later:
        disk.sync_folder(Path(folder))
    return later


def clean(folder: str | Path, disk: Disk | None = None) -> None:
    """Remove what killed saves and removals left behind. Only one run at a time may write to ``folder``."""
    disk = disk or Disk()
    for path in Path(folder).glob(".step-*"):
        match = _LEFT_OVER.fullmatch(path.name)
        if match and match.group(1) in ("tmp", "removed"):
            forget(path, disk)
