"""Weights that training starts from: those of a Hugging Face folder, or of one of our checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.checkpoint.load import misfits, read_box
from meshwright.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.errors import CheckpointError
from meshwright.model.hugging_face import load_into
from meshwright.model.transformer import StageModel


def load_weights(module: StageModel, folder: Path) -> None:
    """Fill a stage's parameters, of which masters are made afterwards; only this rank's boxes are read.

    Optimizer state, step and data position of a checkpoint stay behind: for those there is ``--resume``. Its element
    type may be another than the module's.

    Raises:
        CheckpointError: the checkpoint is damaged, or has missing, extra or other-shaped parameters; all are named.
        InputError: so is, or has, the Hugging Face folder.
    """
    if not (folder / MANIFEST).exists():
        load_into(module, folder)
        return
    manifest = read_manifest(folder)
    held = {key: entry.dtype for key, entry in manifest.tensors.items()}
    wanted = [(f"parameter/{name}", shape) for name, shape in module.spec.parameters()]
    # A type that is not there is that of a tensor that is not there, which is said anyway.
    problem = misfits(manifest, [(key, held.get(key), shape) for key, shape in wanted], ("parameter",))
    if problem:
        raise CheckpointError(problem)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for fqn, segments in module.segments.items():
            physical = parameters[fqn].data
            if sum(segment.count for segment in segments) != physical.numel():
                physical.zero_()  # padding
            for segment in segments:
                box = read_box(manifest, segment.name, segment.offsets, segment.sizes)
                segment.box(physical).copy_(box)
