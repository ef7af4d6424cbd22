"""Weights that training starts from: those of a Hugging Face folder, or of one of our checkpoints."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.load import misfits, read_box
from meshwright.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from meshwright.errors import CheckpointError, InputError
from meshwright.job.model_spec import ModelSpec
from meshwright.model.hugging_face import HuggingFaceFolder, load_into
from meshwright.model.transformer import StageModel


def load_weights(module: StageModel, folder: Path) -> None:
    """Fill a stage's parameters, of which masters are made afterwards; only this rank's boxes are read.

    Optimizer state, step and data position of a checkpoint stay behind: for those there is ``--resume``. Its element
    type may be another than the module's.

    Raises:
        CheckpointError: the checkpoint is damaged, or has missing, extra or other-shaped parameters; all are named.
        InputError: so is, or has, the Hugging Face folder.
    """
    if not _is_checkpoint(folder):
        load_into(module, folder)
        return
    manifest = _fitting_manifest(module.spec, folder)
    module.fill(lambda segment: read_box(manifest, segment.name, segment.offsets, segment.sizes))


def check_weights(spec: ModelSpec, folder: Path) -> None:
    """Refuse a folder whose weights are not those of the model; only names and shapes are read.

    Raises:
        CheckpointError, InputError: as ``load_weights``, except for damage among the values themselves.
    """
    if not folder.is_dir():
        raise InputError(
            f"model.init_from: {folder} is not a folder; give a Hugging Face folder, or a step-N folder of a run"
        )
    if _is_checkpoint(folder):
        _fitting_manifest(spec, folder)
    else:
        HuggingFaceFolder(folder, spec)


def _is_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint of ours is or was to be here, though it may lack its manifest."""
    return (folder / MANIFEST).exists() or any(folder.glob("rank-*.safetensors"))


def _fitting_manifest(spec: ModelSpec, folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    held = {key: entry.dtype for key, entry in manifest.tensors.items()}
    wanted = [(f"parameter/{name}", shape) for name, shape in spec.parameters()]
    # A type that is not there is that of a tensor that is not there, which is said anyway.
    problem = misfits(manifest, [(key, held.get(key), shape) for key, shape in wanted], ("parameter",))
    if problem:
        raise CheckpointError(problem)
    return manifest
