"""Saving: every element once, spread over the ranks, and either all of it or nothing.

The files are written into a hidden sibling ``.step-N.tmp-<token>``, each is synced, the manifest comes
last, and then the folder is renamed. Whoever dies at whatever point leaves the checkpoint of this
step or the ones before, never something between.
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.boxes import Box, chunks, cover_problem
from meshwright.checkpoint.delta import Linked, candidates, intact, link, parent_step
from meshwright.checkpoint.disk import Disk, forget
from meshwright.checkpoint.drill import restore_in_another_process
from meshwright.checkpoint.folder import clean, is_complete, step_folder
from meshwright.checkpoint.manifest import MANIFEST, Entry, FileEntry, Manifest, Slice, encode, read_manifest
from meshwright.checkpoint.placed import DTYPE_NAMES, PlacedTensor
from meshwright.checkpoint.retention import Retention, rotate
from meshwright.checkpoint.tensor_file import Piece, content_of, verify_file, write_file
from meshwright.checkpoint.world import World, current_world
from meshwright.errors import MeshwrightError, SaveError
from meshwright.version import __version__

SLICE_BYTES = 32 * 2**20
"""Larger boxes are cut: a slice is read whole to compare its checksum, and written by one rank."""

_BYTES_ABOUT_A_SLICE = 512
"""Its entries in a header and in the manifest, with something to spare."""

Described = list[Any]
"""A piece as JSON: [key, dtype, global shape, offsets, sizes, bytes]."""


def save(
    folder: str | Path,
    step: int,
    tensors: Sequence[PlacedTensor],
    *,
    layout: str = "",
    model: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
    keep: Retention | int | None = None,
    finite: bool = False,
    drill: bool = False,
    full_every: int | None = None,
    world: World | None = None,
    disk: Disk | None = None,
) -> Path:
    """Write the checkpoint of ``step``; all ranks call it together and return or raise together.

    Args:
        folder: of the run's checkpoints, the same for all ranks, on storage they share.
        step: optimizer steps done.
        tensors: boxes this rank holds. A box that several ranks hold equally is written by one of them.
        layout: short form, for people; any layout can load it.
        model: the shape of the model.
        optimizer: name and groups.
        state: what else must come back: data cursor, loss scaler.
        keep: remove older ones beyond this many (or by this rule), once the new one has been read back and verified.
        finite: refuse to save infinities and NaN: such a state must not take the place of a good one.
        drill: let another process load it whole before older ones go.
        full_every: refer to slices that the checkpoint before holds already, but write everything anew every so
            many times; absent: always.
        world: the ranks; absent: the default process group, or this process alone.
        disk: the file system; tests pass one that fails.

    Returns:
        The folder of the new checkpoint.

    Raises:
        SaveError: a rank failed, there is not enough space, or the boxes do not cover every tensor once.
            Nothing earlier is lost.
    """
    save_ = _Save(Path(folder), step, world or current_world(), disk or Disk())
    save_.write(tensors, finite, full_every)
    header = {"layout": layout, "model": model or {}, "optimizer": optimizer or {}, "state": state or {}}
    save_.commit(header)
    if drill:
        save_.drill()
    if keep is not None:
        save_.rotate(keep)
    return save_.target


class _Save:
    """One save in progress on this rank."""

    def __init__(self, folder: Path, step: int, world: World, disk: Disk) -> None:
        self.folder, self.step, self.world, self.disk = folder, step, world, disk
        self.target = step_folder(folder, step)
        token = world.broadcast(secrets.token_hex(4))
        self.temporary = folder / f".step-{step}.tmp-{token}"
        self.plan: list[tuple[Described, int]] = []
        self.written: list[Any] = []
        self.linked = Linked({}, {})
        self.generation = 0

    def write(self, tensors: Sequence[PlacedTensor], finite: bool, full_every: int | None) -> None:
        """Agree who writes what, and write this rank's part."""
        self._together(self._open, rank_0=True)
        pieces = list(self._together(lambda: pieces_of(tensors)) or [])
        described = self.world.gather([_describe(piece) for piece in pieces])

        def planned() -> list[list[int]]:
            self.plan, assignment = plan(described)
            return assignment

        assignment = self._together(planned, rank_0=True)
        mine = [pieces[number] for number in self.world.scatter(assignment or [])]
        held = self._reused(mine, full_every) if full_every is not None else [None] * len(mine)
        needed = self.world.gather(_needed(mine, held))
        self._together(lambda: self._check_space(sum(needed)), rank_0=True)
        outcome = self._together(lambda: self._write_file(mine, held, finite))
        self.written = self.world.gather(outcome)

    def _reused(self, mine: Sequence[Piece], full_every: int) -> list[Slice | None]:
        """Link what the checkpoint before holds already; for each of this rank's pieces the slice there, if there is.

        Rank 0 looks which files are worth it, the ranks share out reading and checking them, and rank 0 links those
        that are still as they were.
        """
        before = self._together(lambda: parent_step(self.folder, self.step, full_every), rank_0=True)
        before = self.world.broadcast(before)
        if before is None:
            return [None] * len(mine)
        parent: Manifest = self._together(lambda: read_manifest(step_folder(self.folder, before)))
        contents = self._together(lambda: [content_of(piece) for piece in mine])
        gathered = [[(sum_, size) for sum_, size in rank] for rank in self.world.gather(contents)]
        wanted = (content for rank in gathered for content in rank)
        used = self.world.broadcast(candidates(parent, wanted) if self.world.rank == 0 else None)
        share = sorted(used)[self.world.rank :: self.world.size]
        good = self.world.gather(self._together(lambda: intact(parent, share)))

        def linking() -> None:
            chosen = {file: used[file] for rank in good for file in rank}
            self.linked = link(parent, chosen, self.temporary, self.disk)
            self.generation = parent.generation + 1 if self.linked.files else 0

        self._together(linking, rank_0=True)
        places = self.world.scatter([[self.linked.places.get(content) for content in rank] for rank in gathered])
        return [
            None if place is None else Slice(*piece.box, place[0], place[1], content[1], content[0])
            for piece, place, content in zip(mine, places, contents, strict=True)
        ]

    def _open(self) -> None:
        clean(self.folder, self.disk)
        if self.target.exists() and is_complete(self.target):
            raise SaveError(f"{self.target} is there already")
        self.disk.make_folder(self.temporary)

    def _check_space(self, needed: int) -> None:
        """Refuse a save that the disk has no room for, before anything of it is written."""
        free = self.disk.free_bytes(self.folder)
        if free < needed:
            raise SaveError(
                f"{self.folder} has {free:,} bytes free but the checkpoint needs {needed:,}; free "
                f"{needed - free:,} bytes there (meshwright checkpoint prune), or lower checkpoint.keep"
            )

    def _write_file(
        self, pieces: Sequence[Piece], held: Sequence[Slice | None], finite: bool
    ) -> list[Any]:
        """Write the pieces that are nowhere yet; the file's name, its entry if there is one, and all slices."""
        if not self.temporary.is_dir():
            raise SaveError(f"{self.folder} is not the same folder on all ranks; use storage that all hosts share")
        if finite:
            _check_finite(pieces)
        new = [piece for piece, slice_ in zip(pieces, held, strict=True) if slice_ is None]
        path = self.temporary / f"rank-{self.world.rank:05d}.safetensors"
        entry, written = write_file(path, new, self.disk) if new else (None, [])
        fresh = iter(written)
        slices = [next(fresh) if slice_ is None else slice_ for slice_ in held]
        return [path.name, entry and entry.as_json(), [vars(slice_) for slice_ in slices]]

    def commit(self, header: Mapping[str, Any]) -> None:
        """Rank 0 writes the manifest and gives the folder its name."""

        def commit() -> None:
            data = encode(self._manifest(header))
            with self.disk.create(self.temporary / MANIFEST) as file:
                self.disk.write(file, data)
                self.disk.sync_file(file)
            self.disk.sync_folder(self.temporary)
            if self.target.exists():  # incomplete, so it does not count, but it is not ours to destroy
                broken = self.target.with_name(f".{self.target.name}.broken-{secrets.token_hex(4)}")
                self.disk.rename(self.target, broken)
            self.disk.rename(self.temporary, self.target)
            self.disk.sync_folder(self.folder)
            self.disk.sync_folder(self.folder.parent)

        self._together(commit, rank_0=True)

    def _manifest(self, header: Mapping[str, Any]) -> Manifest:
        places = [0] * self.world.size
        slices: dict[str, list[Slice]] = {}
        whole: dict[str, tuple[str, tuple[int, ...]]] = {}
        for (key, dtype, shape, *_), writer in self.plan:
            piece = self.written[writer][2][places[writer]]
            places[writer] += 1
            box = {"offsets": tuple(piece["offsets"]), "sizes": tuple(piece["sizes"])}
            slices.setdefault(key, []).append(Slice(**{**piece, **box}))
            whole[key] = dtype, tuple(shape)
        return Manifest(
            step=self.step,
            **header,
            versions={
                "meshwright": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            tensors={key: Entry(*whole[key], tuple(slices[key])) for key in slices},
            files=self.linked.files | {name: FileEntry(**entry) for name, entry, _ in self.written if entry},
            generation=self.generation,
        )

    def drill(self) -> None:
        """Another process, begun by rank 0, loads the new checkpoint whole."""
        self._together(lambda: restore_in_another_process(self.target), rank_0=True)

    def rotate(self, keep: Retention | int) -> None:
        """Every rank reads back what it wrote; when all of it is right, rank 0 removes the oldest."""

        def read_back() -> None:
            manifest = read_manifest(self.target)
            for name in manifest.files:
                if name.startswith(f"rank-{self.world.rank:05d}."):
                    verify_file(manifest, name)

        self._together(read_back)
        self._together(lambda: rotate(self.folder, keep, self.step, self.disk), rank_0=True)

    def _together(self, action: Callable[[], Any], *, rank_0: bool = False) -> Any:
        """Run ``action`` here (or on rank 0 only); when it failed anywhere, all ranks raise the same error."""
        result: Any = None
        failure: str | None = None
        cause: Exception | None = None
        if self.world.rank == 0 or not rank_0:
            try:
                result = action()
            except OSError as error:
                failure, cause = f"{error.filename or self.temporary}: {error.strerror or error}", error
            except MeshwrightError as error:
                failure, cause = str(error), error
            except Exception as error:  # whatever it is, the other ranks must not wait for this one
                failure, cause = f"{type(error).__name__}: {error}", error
        failures = [failure] if rank_0 else self.world.gather(failure)
        said = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text] if self.world.rank == 0 else []
        said = self.world.broadcast(said)
        if said:
            if self.world.rank == 0:
                forget(self.temporary, self.disk)
            raise SaveError(
                f"checkpoint: step {self.step} could not be saved to {self.folder} ({'; '.join(said)}); "
                "earlier checkpoints are untouched"
            ) from cause
        return result


def _needed(pieces: Sequence[Piece], held: Sequence[Slice | None]) -> int:
    """Bytes this rank has to write."""
    return sum(
        piece.bytes * (slice_ is None) + _BYTES_ABOUT_A_SLICE for piece, slice_ in zip(pieces, held, strict=True)
    )


def _check_finite(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        tensor = piece.tensor
        if tensor.is_floating_point() and not all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor)):
            raise SaveError(f"{piece.source.key} is not finite (NaN or infinity), and such a state is not saved")


def pieces_of(tensors: Sequence[PlacedTensor], slice_bytes: int = SLICE_BYTES) -> list[Piece]:
    """The boxes cut into slices of at most ``slice_bytes``; empty boxes are left out."""
    return [
        Piece(tensor, box)
        for tensor in tensors
        if tensor.tensor.numel()
        for box in chunks(tensor.box, max(1, slice_bytes // tensor.tensor.element_size()))
    ]


def _describe(piece: Piece) -> Described:
    source = piece.source
    return [source.key, DTYPE_NAMES[source.tensor.dtype], source.global_shape, *piece.box, piece.bytes]


def plan(described: Sequence[Sequence[Described]]) -> tuple[list[tuple[Described, int]], list[list[int]]]:
    """Who writes which piece: each box once, by the rank among its holders that has least to write.

    Args:
        described: the pieces of each rank.

    Returns:
        The pieces in the order of writing with the rank of each, and for each rank the numbers of its
        own pieces to write. The work is linear in the number of pieces.

    Raises:
        SaveError: the pieces do not cover each tensor exactly once, or ranks disagree on a tensor.
    """
    holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    tensors: dict[str, tuple[str, tuple[int, ...], list[Box]]] = {}
    for rank, pieces in enumerate(described):
        for number, (key, dtype, shape, offsets, sizes, _) in enumerate(pieces):
            box: Box = (tuple(offsets), tuple(sizes))
            known = tensors.setdefault(key, (dtype, tuple(shape), []))
            if known[:2] != (dtype, tuple(shape)):
                raise SaveError(
                    f"{key} is {dtype} of shape {list(shape)} on rank {rank}, "
                    f"but {known[0]} of {list(known[1])} elsewhere"
                )
            found = holders.setdefault((key, *box), [])
            if not found:
                known[2].append(box)
            found.append((rank, number))
    for key, (_, shape, boxes) in tensors.items():
        problem = cover_problem(shape, boxes)
        if problem:
            raise SaveError(f"{key}: {problem}")
    load = [0] * len(described)
    order: list[tuple[Described, int]] = []
    assignment: list[list[int]] = [[] for _ in described]
    # Pieces with one possible writer first: the others then even out.
    for found in sorted(holders.values(), key=len):
        rank, number = min(found, key=lambda holder: (load[holder[0]], holder[0]))
        piece = described[rank][number]
        load[rank] += piece[5]
        assignment[rank].append(number)
        order.append((piece, rank))
    return order, assignment
