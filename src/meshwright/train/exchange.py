"""Weights of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.checkpoint.load import read_tensor
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.placed import DTYPES
from meshwright.errors import InputError
from meshwright.files import folder_problem
from meshwright.job.model_spec import ModelSpec
from meshwright.model.hugging_face import save


def export_hugging_face(checkpoint: Path, out: Path) -> list[Path]:
    """Write ``config.json`` and safetensors from a ``step-N`` folder, in the element type of its masters.

    The layout that saved it does not matter; padding rows of the vocabulary are not in it.

    Raises:
        CheckpointError: the checkpoint is damaged.
        InputError: ``out`` is not empty, or the model has no Hugging Face counterpart.
    """
    manifest = read_manifest(checkpoint)
    require_empty(out)
    spec = ModelSpec.model_validate(manifest.model)
    dtypes = {DTYPES[entry.dtype] for key, entry in manifest.tensors.items() if key.startswith("parameter/")}
    dtype: torch.dtype = dtypes.pop()
    return save(out, spec, lambda name: read_tensor(manifest, name), dtype=dtype)


def require_empty(out: Path) -> None:
    """Refuse a folder for new files that is there and not empty, or cannot be written.

    Raises:
        InputError: it is.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} is a file; give a new folder")
    if out.exists() and any(out.iterdir()):
        raise InputError(f"--out: {out} is not empty; give a new folder")
    if problem := folder_problem(out):
        raise InputError(f"--out: {out} cannot be written ({problem}); give a folder you may write")
