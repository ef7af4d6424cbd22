"""Loading: any boxes from any boxes, reading only the slices that overlap, every byte checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.boxes import inside, intersection
from meshwright.checkpoint.folder import steps
from meshwright.checkpoint.manifest import Entry, Manifest, Slice, read_manifest
from meshwright.checkpoint.placed import DTYPE_NAMES, DTYPES, PlacedTensor, Role
from meshwright.checkpoint.tensor_file import check_header, damaged, read_slice, unreadable
from meshwright.checkpoint.world import World, current_world
from meshwright.errors import CheckpointError, DamagedCheckpoint

ALL_ROLES: tuple[Role, ...] = ("parameter", "exp_avg", "exp_avg_sq", "momentum")
_NAMES_SHOWN = 8


def load(
    path: str | Path,
    wanted: Sequence[PlacedTensor],
    *,
    roles: Collection[Role] = ALL_ROLES,
    world: World | None = None,
) -> Manifest:
    """Fill the tensors of ``wanted`` from a checkpoint; all ranks call it together.

    Strict: the ranks together must want exactly the tensors that the checkpoint has, with its shapes
    and element types. Nothing is filled when names, shapes or types are wrong.

    Args:
        path: a ``step-N`` folder.
        wanted: boxes of this rank, with the tensors to fill.
        roles: which roles to compare and load; ``("parameter",)`` for weights only.
        world: the ranks; absent: the default process group, or this process alone.

    Returns:
        The manifest, with the state that was saved beside the tensors.

    Raises:
        DamagedCheckpoint: on all ranks, when any finds the checkpoint incomplete or damaged.
        CheckpointError: on all ranks, when any finds it missing or unfit.
    """
    world = world or current_world()
    manifest: Manifest | None = None
    problem: CheckpointError | None = None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        problem = error
    _agree(problem, world, path)
    assert manifest is not None  # some rank had a problem otherwise
    described = [[box.key, DTYPE_NAMES[box.tensor.dtype], box.global_shape] for box in wanted if box.role in roles]
    gathered = world.gather(described)
    unfit = misfits(manifest, (each for rank in gathered for each in rank), roles) if world.rank == 0 else None
    _agree(CheckpointError(unfit) if unfit else None, world, path)
    try:
        problem = None
        _fill(manifest, [box for box in wanted if box.role in roles])
    except CheckpointError as error:
        problem = error
    _agree(problem, world, path)
    return manifest


def _agree(problem: CheckpointError | None, world: World, path: str | Path) -> None:
    """Raise on every rank what the first rank with a problem found."""
    mine = None if problem is None else [str(problem), isinstance(problem, DamagedCheckpoint)]
    found = [each for each in world.gather(mine) if each]
    said = world.broadcast(found[0] if found else None)
    if said:
        text, damage = said
        raise (DamagedCheckpoint if damage else CheckpointError)(text + _previous(Path(path)))


def _previous(path: Path) -> str:
    """What can be used instead of a checkpoint that cannot."""
    name, _, number = path.name.rpartition("-")
    if name != "step" or not number.isdigit():
        return ""
    earlier = [step for step in steps(path.parent) if step < int(number)]
    return f" (the one before is step-{earlier[-1]})" if earlier else ""


def misfits(manifest: Manifest, wanted: Iterable[Sequence[Any]], roles: Collection[str]) -> str | None:
    """Which tensors are missing, extra, or of another shape or type, by name; None when all fit.

    Args:
        manifest: of the checkpoint.
        wanted: ``(key, dtype, global shape)`` of everything any rank wants.
        roles: which roles count.
    """
    asked = {key: (dtype, tuple(shape)) for key, dtype, shape in wanted}
    there = {key: entry for key, entry in manifest.tensors.items() if key.partition("/")[0] in roles}
    both = [key for key in asked if key in there]
    wrong = {
        "lacks": [key for key in asked if key not in there],
        "has tensors that the model does not have": [key for key in there if key not in asked],
        "has another shape for": [
            f"{key} ({list(there[key].shape)} instead of {list(asked[key][1])})"
            for key in both
            if there[key].shape != asked[key][1]
        ],
        "has another element type for": [
            f"{key} ({there[key].dtype} instead of {asked[key][0]})"
            for key in both
            if there[key].dtype != asked[key][0]
        ],
    }
    lines = [f"checkpoint: {manifest.path} {what}: {_listed(names)}" for what, names in wrong.items() if names]
    return "\n".join(lines) or None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + more


def _fill(manifest: Manifest, wanted: Sequence[PlacedTensor]) -> None:
    """Copy every overlap; each slice is read once, file by file, in the order of its bytes."""
    jobs: dict[str, list[tuple[Slice, str, list[PlacedTensor]]]] = {}
    by_key: dict[str, list[PlacedTensor]] = {}
    for box in wanted:
        by_key.setdefault(box.key, []).append(box)
    for key, boxes in by_key.items():
        for piece in manifest.tensors[key].slices:
            takers = [box for box in boxes if intersection(piece.box, box.box)]
            if takers:
                jobs.setdefault(piece.file, []).append((piece, key, takers))
    filled = dict.fromkeys(map(id, wanted), 0)
    for name, reads in jobs.items():
        path = manifest.path / name
        try:
            with path.open("rb") as file:
                check_header(file, path, manifest.files[name])
                for piece, key, takers in sorted(reads, key=lambda read: read[0].begin):
                    values = read_slice(file, path, piece, key, manifest.tensors[key].dtype)
                    for box in takers:
                        filled[id(box)] += _copy(values, piece, box)
        except OSError as error:
            raise unreadable(path, error) from None
    for box in wanted:
        if filled[id(box)] != math.prod(box.sizes):
            raise damaged(manifest.path, f"{box.key} has holes")


@torch.no_grad()
def _copy(values: Tensor, piece: Slice, box: PlacedTensor) -> int:
    shared = intersection(piece.box, box.box)
    if shared is None:
        return 0
    box.boxed[inside(shared, box.offsets)].copy_(values[inside(shared, piece.offsets)])
    return math.prod(shared[1])


def read_tensor(path: str | Path | Manifest, name: str, role: Role = "parameter") -> Tensor:
    """One whole tensor of a checkpoint, by its full name, on the host.

    Args:
        path: a ``step-N`` folder, or its manifest when several tensors are read.
        name: full name, such as ``layers.3.attention.q.weight``.
        role: the parameter itself, or a part of the optimizer's state.

    Raises:
        CheckpointError: there is no such tensor, or its bytes are damaged.
    """
    manifest = path if isinstance(path, Manifest) else read_manifest(path)
    shape = _entry(manifest, f"{role}/{name}").shape
    return read_box(manifest, name, tuple(0 for _ in shape), shape, role)


def read_box(
    manifest: Manifest, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], role: Role = "parameter"
) -> Tensor:
    """One box of a tensor of a checkpoint, on the host; only the slices that overlap it are read.

    Raises:
        CheckpointError: there is no such tensor, or its bytes are damaged.
    """
    entry = _entry(manifest, f"{role}/{name}")
    tensor = torch.empty(sizes, dtype=DTYPES[entry.dtype])
    _fill(manifest, [PlacedTensor(name, entry.shape, offsets, sizes, tensor, role)])
    return tensor


def tensor_names(path: str | Path | Manifest, role: Role = "parameter") -> list[str]:
    """Full names of the tensors with this role, sorted."""
    manifest = path if isinstance(path, Manifest) else read_manifest(path)
    return [key.partition("/")[2] for key in manifest.tensors if key.startswith(f"{role}/")]


def _entry(manifest: Manifest, key: str) -> Entry:
    if key not in manifest.tensors:
        raise CheckpointError(f"checkpoint: {manifest.path} has no tensor {key}; see what it has with inspect")
    return manifest.tensors[key]
