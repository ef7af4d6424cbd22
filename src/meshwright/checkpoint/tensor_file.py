"""Writing one safetensors file slice by slice, and reading single slices back, checked."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from meshwright.checkpoint.boxes import Box, inside
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.manifest import FileEntry, Manifest, Slice, checksum, file_checksum
from meshwright.checkpoint.placed import DTYPE_NAMES, DTYPES, PlacedTensor
from meshwright.errors import CheckpointError, DamagedCheckpoint

_ALIGNMENT = 8


@dataclass(frozen=True)
class Piece:
    """A box of a placed tensor that becomes one slice of a file."""

    source: PlacedTensor
    box: Box

    @property
    def tensor(self) -> Tensor:
        """Its elements, a view of the source."""
        return self.source.boxed[inside(self.box, self.source.offsets)]

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.box[1]) * self.source.tensor.element_size()

    @property
    def name(self) -> str:
        """``role/full name/offsets``: its name in the safetensors file."""
        return f"{self.source.key}/{','.join(map(str, self.box[0]))}"


def _header(pieces: Sequence[Piece]) -> bytes:
    """The 8 bytes of length and the JSON table that begin a safetensors file, padded to 8 bytes."""
    table: dict[str, object] = {}
    position = 0
    for piece in pieces:
        dtype = DTYPE_NAMES[piece.source.tensor.dtype]
        table[piece.name] = {
            "dtype": dtype,
            "shape": list(piece.box[1]),
            "data_offsets": [position, position + piece.bytes],
        }
        position += piece.bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def content_of(piece: Piece) -> tuple[str, int]:
    """Checksum and size of the bytes that would be written."""
    data = _raw(piece.tensor)
    return checksum(data), len(data)


def _raw(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def write_file(path: Path, pieces: Sequence[Piece], disk: Disk) -> tuple[FileEntry, list[Slice]]:
    """Write ``pieces`` as a new safetensors file and wait until it stands on the medium.

    One piece at a time is copied to the host. Larger element types come first, so every slice is aligned.

    Raises:
        OSError: the disk refused.
    """
    ordered = sorted(pieces, key=lambda piece: -piece.source.tensor.element_size())
    header = _header(ordered)
    slices: list[Slice] = []
    position = len(header)
    with disk.create(path) as file:
        disk.write(file, header)
        for piece in ordered:
            data = _raw(piece.tensor)
            disk.write(file, data)
            slices.append(Slice(*piece.box, path.name, position, len(data), checksum(data)))
            position += len(data)
        disk.sync_file(file)
    header_sum = checksum(header)
    whole = file_checksum(header_sum, (piece.checksum for piece in slices))
    order = {id(piece): place for place, piece in enumerate(ordered)}
    return (
        FileEntry(position, len(header), header_sum, whole),
        [slices[order[id(piece)]] for piece in pieces],
    )


def damaged(file: Path, what: str) -> DamagedCheckpoint:
    """The error for a file whose bytes are not those that were written."""
    return DamagedCheckpoint(f"checkpoint: {file} is damaged ({what}); use another checkpoint")


def unreadable(file: Path, error: OSError) -> CheckpointError:
    """The error for a file that the system does not let be read: by its permissions, or by the medium."""
    if isinstance(error, PermissionError):
        return CheckpointError(f"checkpoint: {file} may not be read; give a folder that you may read")
    return damaged(file, f"cannot be read: {error.strerror}")


def check_header(file: BinaryIO, path: Path, entry: FileEntry) -> None:
    """Raise when the header is not the one that was written."""
    if checksum(file.read(entry.header_bytes)) != entry.header_checksum:
        raise damaged(path, "its header's checksum does not fit")


def read_slice(file: BinaryIO, path: Path, piece: Slice, key: str, dtype: str) -> Tensor:
    """The elements of one slice, in the shape of its box, after its checksum was compared.

    Raises:
        CheckpointError: the bytes are not those that were written; file, tensor and position are named.
    """
    file.seek(piece.begin)
    data = bytearray(piece.bytes)
    count = file.readinto(data)  # type: ignore[attr-defined]  # every binary file has it
    if count != piece.bytes or checksum(memoryview(data)) != piece.checksum:
        raise damaged(path, f"the checksum of {key} at byte {piece.begin} does not fit")
    if not data:
        return torch.empty(piece.sizes, dtype=DTYPES[dtype])
    return torch.frombuffer(data, dtype=DTYPES[dtype]).view(piece.sizes)


def verify_slices(manifest: Manifest, name: str, held: Sequence[tuple[str, str, Slice]]) -> None:
    """Read the header and these slices of one file, and compare their checksums.

    Raises:
        DamagedCheckpoint: the first that does not fit, with the file's name.
    """
    path = manifest.path / name
    try:
        with path.open("rb") as file:
            check_header(file, path, manifest.files[name])
            for key, dtype, piece in held:
                read_slice(file, path, piece, key, dtype)
    except OSError as error:
        raise unreadable(path, error) from None


def verify_file(manifest: Manifest, name: str) -> None:
    """Read one file whole and compare every checksum in it.

    Raises:
        DamagedCheckpoint: the first that does not fit, with the file's name.
    """
    verify_slices(manifest, name, manifest.contents[name])
    check_sum_of_sums(manifest, name)


def check_sum_of_sums(manifest: Manifest, name: str) -> None:
    """Raise when a file's checksum is not that of its header's and its slices'."""
    entry = manifest.files[name]
    sums = (part[2] for part in manifest.parts(name))
    if file_checksum(entry.header_checksum, sums) != entry.checksum:
        raise damaged(manifest.path / name, "its checksum does not fit")
