"""What a checkpoint, or the folder of a run's checkpoints, holds: facts for people and for machines."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.checkpoint.delta import accounts, on_disk
from meshwright.checkpoint.folder import left_overs, step_of
from meshwright.checkpoint.manifest import FORMAT, MANIFEST, Manifest, read_manifest
from meshwright.checkpoint.retention import PIN
from meshwright.errors import CheckpointError


def describe(path: Path) -> dict[str, Any]:
    """Everything a manifest says, without its checksums. Files are not read.

    Raises:
        CheckpointError: it is no checkpoint, or not a complete one.
    """
    manifest = read_manifest(path)
    return {
        "path": str(path),
        "format": FORMAT,
        "version": manifest.version,
        "step": manifest.step,
        "bytes": manifest.bytes,
        **asdict(accounts(manifest)),
        "pinned": (path / PIN).exists(),
        "saved": (path / MANIFEST).stat().st_mtime,
        "layout": manifest.layout,
        "model": dict(manifest.model),
        "optimizer": dict(manifest.optimizer),
        "state": dict(manifest.state),
        "versions": dict(manifest.versions),
        "roles": roles(manifest),
        "files": {name: entry.bytes for name, entry in sorted(manifest.files.items())},
        "tensors": {
            key: {"dtype": entry.dtype, "shape": list(entry.shape), "slices": len(entry.slices)}
            for key, entry in sorted(manifest.tensors.items())
        },
    }


def roles(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Tensors, elements and bytes by role."""
    result: dict[str, dict[str, int]] = {}
    for key, entry in manifest.tensors.items():
        role = result.setdefault(key.partition("/")[0], {"tensors": 0, "elements": 0, "bytes": 0})
        role["tensors"] += 1
        role["elements"] += math.prod(entry.shape)
        role["bytes"] += sum(piece.bytes for piece in entry.slices)
    return dict(sorted(result.items()))


def describe_run(paths: list[Path]) -> dict[str, Any]:
    """The checkpoints of a run by step, incomplete ones with the reason, and what lies beside them."""
    return {
        "folder": str(paths[0].parent),
        "checkpoints": [_line(path) for path in paths],
        "bytes_on_disk": on_disk(paths),
        "left_overs": [each.name for each in left_overs(paths[0].parent)],
    }


def _line(path: Path) -> dict[str, Any]:
    line: dict[str, Any] = {"path": str(path), "step": step_of(path), "pinned": (path / PIN).exists()}
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return {**line, "complete": False, "problem": str(error)}
    saved = (path / MANIFEST).stat().st_mtime
    return {**line, "complete": True, "bytes": manifest.bytes, "layout": manifest.layout, "saved": saved}
