"""The folder of a run's checkpoints: which there are, which is the last, and which may go."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from meshwright.checkpoint.disk import Disk, forget
from meshwright.checkpoint.manifest import Manifest, read_manifest
from meshwright.checkpoint.tensor_file import verify_file
from meshwright.errors import CheckpointError

_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_LEFT_OVER = re.compile(r"\.step-[0-9]+\.(tmp|removed|broken)-[0-9a-f]+")


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


def verify(path: str | Path) -> Manifest:
    """Read a checkpoint whole and compare every checksum.

    Raises:
        CheckpointError: what is wrong first, with the file's name.
    """
    manifest = read_manifest(path)
    for name in manifest.files:
        verify_file(manifest, name)
    return manifest


def rotate(folder: str | Path, keep: int, newest: int, disk: Disk | None = None) -> list[int]:
    """Remove the oldest checkpoints so that ``keep`` up to step ``newest`` stay; the removed steps.

    Call it when ``newest`` is committed and verified. It and checkpoints of later steps (left by
    another course of the run) are never removed, nor anything when ``newest`` is not complete.
    """
    disk = disk or Disk()
    if keep < 1:
        raise ValueError(f"keep={keep} would remove the last checkpoint; use at least 1")
    complete = steps(folder)
    if newest not in complete:
        return []
    removed = [step for step in complete if step <= newest][:-keep]
    for step in removed:
        path = step_folder(folder, step)
        doomed = path.with_name(f".{path.name}.removed-{secrets.token_hex(4)}")
        disk.rename(path, doomed)
        forget(doomed, disk)
    return removed


def clean(folder: str | Path, disk: Disk | None = None) -> None:
    """Remove what killed saves and removals left behind. Only one run at a time may write to ``folder``."""
    disk = disk or Disk()
    for path in Path(folder).glob(".step-*"):
        match = _LEFT_OVER.fullmatch(path.name)
        if match and match.group(1) != "broken":
            forget(path, disk)
