"""Whether a checkpoint's bytes are those that were written: read whole, by several threads, every checksum compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshwright.checkpoint.manifest import Manifest, Slice, read_manifest
from meshwright.checkpoint.tensor_file import check_sum_of_sums, verify_slices
from meshwright.errors import CheckpointError

_PART_BYTES = 128 * 2**20
"""What one thread reads at a time: several share a large file."""

Part = tuple[str, list[tuple[str, str, Slice]]]


def verify(path: str | Path, threads: int | None = None) -> Manifest:
    """Read a checkpoint whole and compare every checksum.

    Args:
        path: a ``step-N`` folder.
        threads: how many read at once; absent: one a core. Checksums are computed outside the interpreter's lock.

    Raises:
        DamagedCheckpoint: what is wrong first, with the file's name.
        CheckpointError: it is no checkpoint.
    """
    manifest = read_manifest(path)
    found = damage(manifest, threads)
    if found:
        raise found[0]
    return manifest


def damage(manifest: Manifest, threads: int | None = None) -> list[CheckpointError]:
    """What is wrong first in each file that is not as it was written; empty when all are."""
    parts = list(_parts(manifest))
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), thread_name_prefix="verify") as pool:
        outcomes = list(pool.map(lambda part: _problem(manifest, part), parts))
    first: dict[str, CheckpointError] = {}
    for (name, _), problem in zip(parts, outcomes, strict=True):
        if problem is not None:
            first.setdefault(name, problem)
    return [first[name] for name in sorted(first)]


def _parts(manifest: Manifest) -> Iterator[Part]:
    """Every file in parts of about ``_PART_BYTES``; a file without slices is one part."""
    for name, held in manifest.contents.items():
        part: list[tuple[str, str, Slice]] = []
        size = 0
        for each in held:
            part.append(each)
            size += each[2].bytes
            if size >= _PART_BYTES:
                yield name, part
                part, size = [], 0
        if part or not held:
            yield name, part


def _problem(manifest: Manifest, part: Part) -> CheckpointError | None:
    name, held = part
    try:
        verify_slices(manifest, name, held)
        check_sum_of_sums(manifest, name)
    except CheckpointError as error:
        return error
    return None
