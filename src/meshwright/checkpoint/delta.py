"""What a checkpoint need not write anew: slices whose very bytes the checkpoint before it holds already.

Slices are found by their content (checksum and size), whatever tensor they belong to. The file that holds them gets a
second name, a hard link, in the new folder: so every folder is whole by itself, can be removed by itself, and a file
goes when its last name goes. It is linked only while at least half of it is still used, so what is unused never exceeds
what is used.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.folder import step_folder, steps
from meshwright.checkpoint.manifest import FileEntry, Manifest, Unused, read_manifest
from meshwright.checkpoint.tensor_file import verify_file
from meshwright.errors import CheckpointError

Content = tuple[str, int]
"""Checksum and bytes of a slice."""
Place = tuple[str, int]
"""File and first byte of a slice."""

_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
"""What a file system says that cannot give a file a second name."""


def parent_step(folder: Path, step: int, full_every: int) -> int | None:
    """The checkpoint that the one of ``step`` may refer to: the last before it, unless a full one is due."""
    earlier = [found for found in steps(folder) if found < step]
    if not earlier:
        return None
    parent = read_manifest(step_folder(folder, earlier[-1]))
    return parent.step if parent.generation + 1 < full_every else None


def candidates(parent: Manifest, contents: Iterable[Content]) -> dict[str, list[int]]:
    """Files of the parent worth linking: by name, where the slices begin that would be used."""
    places = _index(parent)
    used: dict[str, set[int]] = {}
    for content in contents:
        if content in places:
            file, begin = places[content]
            used.setdefault(file, set()).add(begin)
    result = {}
    for file, begins in used.items():
        sizes = {begin: size for begin, size, _ in parent.parts(file)}
        if 2 * sum(sizes[begin] for begin in begins) >= sum(sizes.values()):
            result[file] = sorted(begins)
    return result


def _index(parent: Manifest) -> dict[Content, Place]:
    """Where the parent holds each content."""
    return {
        (piece.checksum, piece.bytes): (piece.file, piece.begin)
        for entry in parent.tensors.values()
        for piece in entry.slices
    }


def intact(parent: Manifest, files: Sequence[str]) -> list[str]:
    """Those of the files whose bytes are still what was written: damage is not handed on."""
    good = []
    for name in files:
        try:
            verify_file(parent, name)
        except CheckpointError:
            continue
        good.append(name)
    return good


def linked_name(step: int, file: str) -> str:
    """What a file of the checkpoint of ``step`` is called where it is linked; once linked, it keeps its name."""
    return f"step-{step}.{file}" if file.startswith("rank-") else file


@dataclass(frozen=True)
class Linked:
    """Files of the parent that the new checkpoint has too."""

    files: dict[str, FileEntry]
    """By their name in the new folder."""
    places: dict[Content, Place]
    """Where each content lies in them."""


def link(parent: Manifest, used: dict[str, list[int]], target: Path, disk: Disk) -> Linked:
    """Link files of the parent into the folder of the new checkpoint, as far as the file system can.

    Args:
        parent: an earlier checkpoint of the same run.
        used: the files, and where their used slices begin.
        target: the new, still hidden folder.
        disk: the file system.

    Raises:
        OSError: the disk failed otherwise.
    """
    files: dict[str, FileEntry] = {}
    for file, begins in used.items():
        name = linked_name(parent.step, file)
        try:
            disk.link(parent.path / file, target / name)
        except OSError as error:
            if error.errno in _NO_LINKS:
                continue
            raise
        unused = tuple(Unused(*part) for part in parent.parts(file) if part[0] not in begins)
        files[name] = replace(parent.files[file], unused=unused)
    places = {
        content: (linked_name(parent.step, file), begin)
        for content, (file, begin) in _index(parent).items()
        if linked_name(parent.step, file) in files and begin in used[file]
    }
    return Linked(files, places)


@dataclass(frozen=True)
class Saved:
    """What an incremental checkpoint wrote, and what it did not have to."""

    written_bytes: int
    """Of files of its own."""
    referenced_bytes: int
    """Of slices in linked files."""
    unused_bytes: int
    """Of linked files, that nothing in it refers to: they stay as long as the file does."""


def accounts(manifest: Manifest) -> Saved:
    """Where the bytes of a checkpoint come from."""
    linked = [name for name in manifest.files if not name.startswith("rank-")]
    unused = sum(part.bytes for name in linked for part in manifest.files[name].unused)
    headers = sum(manifest.files[name].header_bytes for name in linked)
    total = sum(manifest.files[name].bytes for name in linked)
    return Saved(manifest.bytes - total, total - unused - headers, unused + headers)


def on_disk(folders: Iterable[Path]) -> int:
    """Bytes that the files of these folders take, each counted once however many names it has."""
    return sum({inode: size for inode, size, _ in _files(folders)}.values())


def freed_by(folders: Iterable[Path]) -> int:
    """Bytes that removing these folders frees: of files that have no name elsewhere."""
    names: dict[int, int] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for inode, size, links in _files(folders):
        names[inode] = names.get(inode, 0) + 1
        sizes[inode] = size, links
    return sum(size for inode, (size, links) in sizes.items() if names[inode] >= links)


def _files(folders: Iterable[Path]) -> Iterator[tuple[int, int, int]]:
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file():
                status = file.stat()
                yield status.st_ino, status.st_size, status.st_nlink
