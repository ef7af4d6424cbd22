"""The manifest: what a checkpoint holds, where each slice lies, and the checksums of all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from meshwright.checkpoint.boxes import Box
from meshwright.errors import CheckpointError, DamagedCheckpoint

MANIFEST = "manifest.json"
FORMAT = "meshwright-checkpoint"
VERSION = 1
INCREMENTAL_VERSION = 2
"""Of a checkpoint that has files of the one before it; otherwise like version 1."""


def checksum(data: bytes | memoryview) -> str:
    """XXH3, 128 bits: against damage, at memory speed (eighteen times that of BLAKE2b); not against forgery."""
    return xxhash.xxh3_128_hexdigest(data)


def file_checksum(header: str, slices: Iterable[str]) -> str:
    """The checksum of a file from those of its header and its slices, which are all of its bytes."""
    return checksum(",".join([header, *slices]).encode())


@dataclass(frozen=True)
class Slice:
    """One box of one tensor, in bytes ``begin`` to ``begin + bytes`` of a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    bytes: int
    checksum: str

    @property
    def box(self) -> Box:
        """Offsets and sizes."""
        return self.offsets, self.sizes


@dataclass(frozen=True)
class Entry:
    """One whole tensor: its element type (by safetensors' name), its shape, and its slices."""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Unused:
    """A part of a linked file that only the checkpoint that wrote it refers to."""

    begin: int
    bytes: int
    checksum: str


@dataclass(frozen=True)
class FileEntry:
    """One safetensors file: its size, that of its header, and the checksums of header and whole."""

    bytes: int
    header_bytes: int
    header_checksum: str
    checksum: str
    unused: tuple[Unused, ...] = ()
    """Its parts that are no slice of this checkpoint."""

    def as_json(self) -> dict[str, Any]:
        """The entry as a JSON object; ``unused`` only where there is some."""
        content = {name: value for name, value in vars(self).items() if name != "unused"}
        return content | ({"unused": [vars(part) for part in self.unused]} if self.unused else {})


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``. ``state`` is what the trainer keeps besides tensors."""

    step: int
    layout: str
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    state: Mapping[str, Any]
    """Data cursor, loss scaler, and whatever else must come back as it was."""
    versions: Mapping[str, str]
    tensors: Mapping[str, Entry]
    """By ``role/full name``."""
    files: Mapping[str, FileEntry]
    generation: int = 0
    """How many checkpoints in a row, this one counted, have referred to the one before; 0: all is its own."""
    path: Path = field(default=Path(), compare=False)
    """The folder it was read from."""

    @property
    def version(self) -> int:
        """Of the format."""
        return INCREMENTAL_VERSION if self.generation else VERSION

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.bytes for entry in self.files.values())

    @cached_property
    def contents(self) -> Mapping[str, list[tuple[str, str, Slice]]]:
        """By file: key, element type and slice of what it holds, in the order of its bytes."""
        found: dict[str, list[tuple[str, str, Slice]]] = {name: [] for name in self.files}
        for key, entry in self.tensors.items():
            for piece in entry.slices:
                found[piece.file].append((key, entry.dtype, piece))
        for name, file in self.files.items():
            for part in file.unused:
                box = (0,), (part.bytes,)
                found[name].append(("an unused part", "U8", Slice(*box, name, part.begin, part.bytes, part.checksum)))
        return {name: sorted(held, key=lambda each: each[2].begin) for name, held in found.items()}

    def parts(self, file: str) -> list[tuple[int, int, str]]:
        """First byte, size and checksum of every part of a file, in their order; what two tensors share is one."""
        parts = {piece.begin: (piece.begin, piece.bytes, piece.checksum) for _, _, piece in self.contents[file]}
        return [parts[begin] for begin in sorted(parts)]


def encode(manifest: Manifest) -> bytes:
    """The manifest as canonical JSON with its root hash: equal manifests have equal bytes."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": manifest.version,
        "step": manifest.step,
        "layout": manifest.layout,
        "model": dict(manifest.model),
        "optimizer": dict(manifest.optimizer),
        "state": dict(manifest.state),
        "versions": dict(manifest.versions),
        "tensors": {
            key: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "slices": [vars(piece) for piece in entry.slices],
            }
            for key, entry in manifest.tensors.items()
        },
        "files": {name: entry.as_json() for name, entry in manifest.files.items()},
    }
    if manifest.generation:
        content["generation"] = manifest.generation
    return _canonical({**content, "root": _root(content)})


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _root(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(_canonical(content), digest_size=32).hexdigest()


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of a checkpoint, and that its files are there in full size.

    Raises:
        DamagedCheckpoint: it is incomplete or damaged; the file is named.
        CheckpointError: the folder is no checkpoint, is of another format version, or may not be read.
    """
    folder = Path(folder)
    file = folder / MANIFEST
    try:
        if not folder.is_dir():
            raise CheckpointError(f"checkpoint: {folder} is not a folder; give a step-N folder of a run's checkpoints")
        data = file.read_bytes()
    except FileNotFoundError:
        raise _no_manifest(folder) from None
    except OSError as error:
        raise CheckpointError(
            f"checkpoint: {file} cannot be read ({error.strerror}); give a folder that you may read"
        ) from None
    content = _checked_content(data, file)
    try:
        manifest = _decode(content, folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"checkpoint: {file} is not a manifest of this format ({error!r})") from None
    _check_files(manifest)
    return manifest


def _no_manifest(folder: Path) -> CheckpointError:
    """What a folder without a manifest seems to be, and what to give instead."""
    if any(folder.glob("rank-*.safetensors")):
        return DamagedCheckpoint(
            f"checkpoint: {folder} has no {MANIFEST} beside its data, so it was copied or written only in part; "
            "copy it again whole, or use another checkpoint"
        )
    if (folder / ".metadata").is_file():
        return CheckpointError(
            f"checkpoint: {folder} is a checkpoint of torch.distributed.checkpoint, not of meshwright; "
            "bring it in with meshwright checkpoint import"
        )
    if (folder / "config.json").is_file():
        return CheckpointError(
            f"checkpoint: {folder} is a Hugging Face folder, not a checkpoint; train from it with model.init_from"
        )
    return CheckpointError(
        f"checkpoint: {folder} has no {MANIFEST}, so it is incomplete or no checkpoint; give a step-N folder"
    )


def _checked_content(data: bytes, file: Path) -> dict[str, Any]:
    damaged = f"checkpoint: {file} is damaged ({{}}); use another checkpoint"
    try:
        content = json.loads(data)
    except UnicodeDecodeError as error:
        raise DamagedCheckpoint(damaged.format(f"not UTF-8 at byte {error.start}")) from None
    except ValueError as error:
        raise DamagedCheckpoint(damaged.format(f"not JSON: {error}")) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint: {file} is not a {FORMAT} manifest; give a step-N folder")
    if content.get("version") not in (VERSION, INCREMENTAL_VERSION):
        raise CheckpointError(
            f"checkpoint: {file} has format version {content.get('version')}, but this meshwright reads versions "
            f"{VERSION} and {INCREMENTAL_VERSION}; use a newer meshwright"
        )
    root = content.pop("root", None)
    try:
        intact = root == _root(content) and data == _canonical({**content, "root": root})
    except ValueError:  # half of a surrogate pair: no text
        intact = False
    if not intact:
        raise DamagedCheckpoint(damaged.format("its root hash does not fit its contents"))
    return content


def _decode(content: Mapping[str, Any], folder: Path) -> Manifest:
    tensors = {
        key: Entry(
            entry["dtype"],
            tuple(entry["shape"]),
            tuple(
                Slice(**{**piece, "offsets": tuple(piece["offsets"]), "sizes": tuple(piece["sizes"])})
                for piece in entry["slices"]
            ),
        )
        for key, entry in content["tensors"].items()
    }
    files = {
        name: FileEntry(**{**entry, "unused": tuple(Unused(**part) for part in entry.get("unused", ()))})
        for name, entry in content["files"].items()
    }
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"file name {name!r} leaves the folder")
    strangers = {piece.file for entry in tensors.values() for piece in entry.slices} - files.keys()
    if strangers:
        raise ValueError(f"slices lie in {sorted(strangers)[0]!r}, which is not among its files")
    fields = {name: content[name] for name in ("step", "layout", "model", "optimizer", "state", "versions")}
    return Manifest(**fields, tensors=tensors, files=files, generation=content.get("generation", 0), path=folder)


def _check_files(manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        file = manifest.path / name
        try:
            size = file.stat().st_size
        except PermissionError:
            raise CheckpointError(f"checkpoint: {file} may not be read; give a folder that you may read") from None
        except OSError:
            raise DamagedCheckpoint(
                f"checkpoint: {file} is missing, so the checkpoint is incomplete; use another checkpoint"
            ) from None
        if size != entry.bytes:
            raise DamagedCheckpoint(
                f"checkpoint: {file} has {size} bytes instead of {entry.bytes}, so it is damaged; "
                "use another checkpoint"
            )
