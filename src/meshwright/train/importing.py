"""Weights of a ``torch.distributed.checkpoint`` checkpoint as a Hugging Face folder, which training starts from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.dcp import DcpFolder
from meshwright.checkpoint.placed import DTYPES
from meshwright.errors import InputError
from meshwright.job.model_spec import ModelSpec
from meshwright.model.hf_names import HuggingFaceTensor, hugging_face_tensors
from meshwright.model.hugging_face import save
from meshwright.train.exchange import require_empty

_NOT_WEIGHTS = re.compile(r"(.*\.)?(optim(izer)?\.|inv_freq$|attn\.(masked_)?bias$)")
"""Optimizer state, and buffers that follow from the configuration."""
_HEADS = ("lm_head.weight", "head.weight")
"""Of a tied model: a second name of the embedding."""
_SHOWN = 5


def import_dcp(source: Path, spec: ModelSpec, out: Path, prefix: str | None = None) -> list[Path]:
    """Write ``config.json`` and safetensors from a DCP checkpoint of the model ``spec``; the files written.

    Its tensors must have the model's Hugging Face names, or our own, after a common ``prefix`` (absent: found). All
    must be there in the model's shapes, and no others beside them.

    Raises:
        InputError: a tensor is missing, unknown or of another shape; all are listed; or ``out`` is not empty.
        CheckpointError: the checkpoint cannot be read.
    """
    require_empty(out)
    folder = DcpFolder(source)
    theirs = {tensor.name: tensor for tensor in hugging_face_tensors(spec)}
    ours = dict(spec.parameters())
    shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in theirs.items()}
    start = prefix if prefix is not None else _prefix(folder, next(iter(shapes)))
    if start is None or (prefix is not None and start + next(iter(shapes)) not in folder.tensors):
        shapes = ours
        start = prefix if prefix is not None else _prefix(folder, next(iter(shapes)))
    if start is None:
        raise InputError(
            f"import: {source} has neither {next(iter(theirs))} nor {next(iter(ours))}, under any prefix; it has "
            f"{_listed(sorted(folder.tensors))}"
        )
    _check(folder, start, shapes, spec)
    _check_tied(folder, start, next(iter(shapes)), spec)
    dtypes = {DTYPES[folder.tensors[start + name].dtype] for name in shapes}
    whole_of = _Logical(folder, start, theirs if shapes is not ours else None)
    widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
    return save(out, spec, whole_of, dtype=widest)


class _Logical:
    """Whole logical parameters by our names, whichever names the checkpoint has."""

    def __init__(self, folder: DcpFolder, prefix: str, theirs: Mapping[str, HuggingFaceTensor] | None) -> None:
        self.folder, self.prefix = folder, prefix
        self.of_part = {part: tensor for tensor in (theirs or {}).values() for part in tensor.parts}

    def __call__(self, name: str) -> Tensor:
        if not self.of_part:
            return self.folder.read(self.prefix + name)
        stored = self.of_part[name]
        whole = self.folder.read(self.prefix + stored.name)
        sizes = (stored.rows[stored.parts.index(name)], *stored.rest)
        part = whole[stored.index(name, tuple(0 for _ in sizes), sizes)]
        return part.t() if stored.transposed else part


def _prefix(folder: DcpFolder, anchor: str) -> str | None:
    """What stands before the model's first tensor."""
    found = [
        name.removesuffix(anchor)
        for name in folder.tensors
        if (name == anchor or name.endswith("." + anchor)) and not _NOT_WEIGHTS.match(name)
    ]
    if len(found) > 1:
        shown = ", ".join(repr(each) for each in sorted(found))
        raise InputError(f"import: {folder.folder} has {anchor} under several prefixes; give --prefix, one of {shown}")
    return found[0] if found else None


def _check(folder: DcpFolder, prefix: str, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> None:
    held = {
        name.removeprefix(prefix): tensor
        for name, tensor in folder.tensors.items()
        if name.startswith(prefix) and not _NOT_WEIGHTS.match(name)
    }
    missing = sorted(shapes.keys() - held.keys())
    extra = sorted(held.keys() - shapes.keys() - (set(_HEADS) if spec.tied else set()))
    other = [
        f"{name} ({list(held[name].shape)} instead of {list(shape)})"
        for name, shape in shapes.items()
        if name in held and held[name].shape != tuple(shape)
    ]
    wrong = [name for name in shapes if name in held and not DTYPES[held[name].dtype].is_floating_point]
    lines = [
        f"import: {folder.folder} {what}: {_listed(names)}"
        for what, names in (
            ("lacks", missing),
            ("has tensors that the model does not have", extra),
            ("has another shape for", other),
            ("has no floating-point numbers in", wrong),
        )
        if names
    ]
    if lines:
        raise InputError("\n".join(lines))


def _check_tied(folder: DcpFolder, prefix: str, embedding: str, spec: ModelSpec) -> None:
    for head in _HEADS if spec.tied else ():
        if prefix + head in folder.tensors and not torch.equal(
            folder.read(prefix + head), folder.read(prefix + embedding)
        ):
            raise InputError(
                f"import: {folder.folder}: {head} differs from the embedding although the model ties them; "
                "set model.tied = false"
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
