"""The launcher's side: from what ranks handed over or copied, a checkpoint that lies in memory.

Only what was written in one generation and after one step goes together. Among equal boxes the first is taken;
boxes of ranks that speak for them come first, the rest fills their holes.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.boxes import cover_problem, intersection
from meshwright.checkpoint.manifest import MANIFEST, Entry, FileEntry, Manifest, Slice, encode
from meshwright.recovery.shared import RankMemory, StateFiles
from meshwright.version import __version__

Found = tuple[int, Manifest, dict[str, int]]
"""A step, its manifest, and the descriptor of each of its files."""


def newest_state(ranks: Iterable[RankMemory], *, handed: bool, above: int) -> Found | None:
    """The newest state of which the ranks hold all, if it is of a later step than ``above``.

    Args:
        ranks: whose memory is looked into.
        handed: whether what was handed over counts, beside the copies.
        above: a step; older states, and that one itself, are of no use.
    """
    found: dict[tuple[int, int], list[tuple[dict[str, Any], int]]] = {}
    for memory in ranks:
        for files in (*([memory.hand] if handed else []), *memory.copies):
            content = _index(files)
            if content is not None and content["step"] > above:
                found.setdefault((content["step"], content["generation"]), []).append((content, files.data))
    for step, generation in sorted(found, reverse=True):
        parts = found[step, generation]
        manifest = assembled(step, [content for content, _ in parts])
        if manifest is not None:
            used = {content["file"]: data for content, data in parts if content["file"] in manifest.files}
            return step, manifest, used
    return None


def assembled(step: int, parts: Sequence[Mapping[str, Any]]) -> Manifest | None:
    """The manifest of what several ranks wrote after one step; None when they do not hold all of it."""
    chosen: dict[str, list[Slice]] = {}
    whole: dict[str, tuple[str, tuple[int, ...]]] = {}
    rest: list[tuple[str, Slice]] = []
    for part in parts:
        for key, dtype, shape, counted, values in part["pieces"]:
            piece = Slice(**{**values, "offsets": tuple(values["offsets"]), "sizes": tuple(values["sizes"])})
            whole[key] = dtype, tuple(shape)
            if not counted:
                rest.append((key, piece))
            elif piece.box not in {other.box for other in chosen.setdefault(key, [])}:
                chosen[key].append(piece)
    for key, piece in rest:
        held = chosen.setdefault(key, [])
        if not any(intersection(piece.box, other.box) for other in held):
            held.append(piece)
    for key, (_, shape) in whole.items():
        if cover_problem(shape, [piece.box for piece in chosen.get(key, [])]):
            return None
    # A tensor that only the lost rank held is in nobody's list.
    held_elements: Counter[str] = Counter()
    for key, (_, shape) in whole.items():
        held_elements[key.partition("/")[0]] += math.prod(shape)
    if not whole or any(count != parts[0]["elements"] for count in held_elements.values()):
        return None
    import torch

    used = {piece.file for pieces in chosen.values() for piece in pieces}
    return Manifest(
        step=step,
        **parts[0]["header"],
        versions={"meshwright": __version__, "torch": torch.__version__, "python": platform.python_version()},
        tensors={key: Entry(*whole[key], tuple(chosen[key])) for key in chosen},
        files={part["file"]: FileEntry(**part["entry"]) for part in parts if part["file"] in used},
    )


def put_down(folder: Path, step: int, manifest: Manifest, files: Mapping[str, int]) -> Path:
    """Make ``folder/step-N`` a checkpoint whose files are the launcher's memory; its path.

    Raises:
        OSError: the disk refused.
    """
    path = folder / f"step-{step}"
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    for name, descriptor in files.items():
        (path / name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
    (path / MANIFEST).write_bytes(encode(manifest))
    return path


def _index(files: StateFiles) -> dict[str, Any] | None:
    size = os.fstat(files.index).st_size
    if not size:
        return None
    try:
        content: dict[str, Any] = json.loads(os.pread(files.index, size, 0))
    except ValueError:
        return None  # it was cut short: its writer died
    return content
