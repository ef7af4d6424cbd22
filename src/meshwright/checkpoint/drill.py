"""The restore drill: a process that has written nothing loads a checkpoint whole and compares what it got.

Every tensor is put together from its slices as loading does it; then each slice is cut out of the whole tensor again
and its checksum compared with the one in the manifest, which was taken from memory when it was written.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from meshwright.checkpoint.boxes import inside
from meshwright.checkpoint.load import read_tensor
from meshwright.checkpoint.manifest import checksum, read_manifest
from meshwright.errors import DamagedCheckpoint, MeshwrightError


def restore(path: Path) -> int:
    """Load every tensor of a checkpoint and compare it; how many there are.

    Raises:
        MeshwrightError: one does not come back as it was.
    """
    manifest = read_manifest(path)
    for key, entry in manifest.tensors.items():
        role, _, name = key.partition("/")
        whole = read_tensor(manifest, name, role)  # type: ignore[arg-type]
        origin = tuple(0 for _ in entry.shape)
        for piece in entry.slices:
            part = whole[inside(piece.box, origin)].contiguous().reshape(-1)
            if checksum(part.view(torch.uint8).numpy().data) != piece.checksum:
                raise DamagedCheckpoint(f"checkpoint: {path}: {key} at {list(piece.offsets)} is loaded wrong")
    return len(manifest.tensors)


def restore_in_another_process(path: Path) -> None:
    """Run :func:`restore` in a process of its own.

    Raises:
        DamagedCheckpoint: it failed; with what it said.
    """
    command = [sys.executable, "-m", "meshwright.checkpoint.drill", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise DamagedCheckpoint(f"the restore drill of {path} failed: {said}")


def main() -> None:
    """Entry point of ``python -m meshwright.checkpoint.drill PATH``."""
    try:
        restore(Path(sys.argv[1]))
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
