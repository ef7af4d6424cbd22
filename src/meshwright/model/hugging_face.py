"""Hugging Face folders (``config.json`` and safetensors): read slice by slice into any layout, and written whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.job.hf_config import hf_config_from_spec
from meshwright.job.model_spec import ModelSpec
from meshwright.model.hf_names import HuggingFaceTensor, hugging_face_tensors
from meshwright.model.segments import Segment
from meshwright.model.transformer import StageModel

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Larger exports are cut into several files, as ``transformers`` does."""

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CONSTANTS = re.compile(r"(.*\.)?h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq")
"""Buffers that old files carry and that follow from the configuration."""


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class HuggingFaceFolder:
    """The weights of one folder, checked against a model's shape and read slice by slice.

    Args:
        folder: with ``model.safetensors``, or an index and its files.
        spec: what the weights must be.

    Raises:
        InputError: a file is missing or damaged, or a tensor is missing, unknown, or of another shape or type;
            the message names it.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self.spec = folder, spec
        self._files: dict[str, Any] = {}
        self._stored = _file_of_tensor(folder)
        self._tensors = {part: tensor for tensor in hugging_face_tensors(spec) for part in tensor.parts}
        self._prefix = ""
        self._check()

    def box(self, segment: Segment) -> Tensor:
        """This rank's box of a logical parameter, as stored; ``[segment.sizes]``."""
        tensor = self._tensors[segment.name]
        piece = self._slice(tensor)[tensor.index(segment.name, segment.offsets, segment.sizes)]
        read: Tensor = piece.t() if tensor.transposed else piece
        if segment.name == "embedding.weight" and self.spec.tied:
            self._check_tied(segment, read)
        return read

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            try:
                self._files[file] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise InputError(f"{path}: no such file, although {INDEX} names it") from None
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: not a whole safetensors file ({error})") from None
        return self._files[file]

    def _slice(self, tensor: HuggingFaceTensor) -> Any:
        name = tensor.name.removeprefix(self._prefix)
        file = self._stored[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError:
            raise InputError(f"{self.folder / file}: {name} is not in it, although {INDEX} says so") from None

    def _check(self) -> None:
        wanted = {tensor.name: tensor for tensor in self._tensors.values()}
        if "wte.weight" in self._stored and "transformer.wte.weight" not in self._stored:
            self._prefix = "transformer."  # written from the model without its head
        expected = {name.removeprefix(self._prefix) for name in wanted}
        missing = sorted(expected - self._stored.keys())
        if missing:
            raise InputError(
                f"{self.folder}: {len(missing)} tensors of the model are missing: {_listed(missing)}; "
                "give a folder whose weights are complete"
            )
        extra = sorted(name for name in self._stored.keys() - expected if not _CONSTANTS.fullmatch(name))
        if self.spec.tied and "lm_head.weight" in extra:
            extra.remove("lm_head.weight")
        if extra:
            raise InputError(
                f"{self.folder}: {len(extra)} tensors have no place in the model: {_listed(extra)}; "
                "give weights of this model, or the model of these weights"
            )
        for tensor in wanted.values():
            stored = self._slice(tensor)
            self._check_shape(tensor.name, stored.get_shape(), tensor.shape)
            if stored.get_dtype() not in _DTYPES:
                raise InputError(
                    f"{self.folder}: {tensor.name} has type {stored.get_dtype()}; use one of {', '.join(_DTYPES)}"
                )

    def _check_shape(self, name: str, found: Sequence[int], expected: tuple[int, ...]) -> None:
        if tuple(found) != expected:
            raise InputError(f"{self.folder}: {name} has shape {list(found)}, the model's is {list(expected)}")

    def _check_tied(self, segment: Segment, embedding: Tensor) -> None:
        if "lm_head.weight" not in self._stored:
            return
        head = self._open(self._stored["lm_head.weight"]).get_slice("lm_head.weight")
        self._check_shape("lm_head.weight", head.get_shape(), segment.shape)
        first = segment.offsets[0]
        if not torch.equal(head[first : first + segment.sizes[0]], embedding):
            raise InputError(
                f"{self.folder}: lm_head.weight differs from the embedding although the model ties them; "
                "set tied = false"
            )


def _file_of_tensor(folder: Path) -> dict[str, str]:
    """File name by tensor name."""
    if (folder / INDEX).is_file():
        path = folder / INDEX
        try:
            files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            if not all(isinstance(file, str) and "/" not in file for file in files.values()):
                raise ValueError("weight_map must give a file name beside it for every tensor")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: not a safetensors index ({error})") from None
        result: dict[str, str] = files
        return result
    path = folder / SINGLE
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except FileNotFoundError:
        raise InputError(f"{folder}: neither {SINGLE} nor {INDEX} is there; only safetensors are read") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error})") from None


def load_into(model: StageModel, folder: Path | str) -> None:
    """Fill a stage's parameters in place from a Hugging Face folder; only this rank's slices are read.

    Raises:
        InputError: as ``HuggingFaceFolder``; every rank checks the whole list, so all raise the same.
    """
    model.fill(HuggingFaceFolder(Path(folder), model.spec).box)


def save(
    folder: Path | str,
    spec: ModelSpec,
    logical: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write ``config.json`` and the weights, in one file or in shards with an index.

    Args:
        folder: made if absent.
        spec: the model.
        logical: gives the whole logical parameter of a full name; called in the order of the network, once each.
        dtype: of the weights in the file.
        max_shard_bytes: a file is closed before it would exceed this.

    Returns:
        The files written.

    Raises:
        InputError: no Hugging Face family has this shape, or a tensor has another shape.
    """
    folder = Path(folder)
    config = hf_config_from_spec(spec) | {"dtype": str(dtype).removeprefix("torch.")}
    shards = list(_shards(spec, dtype.itemsize, max_shard_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    written, weight_map = [], {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for tensor in shard:
            tensors[tensor.name] = tensor.assemble(logical).to(dtype).cpu()
            if tuple(tensors[tensor.name].shape) != tensor.shape:
                found = list(tensors[tensor.name].shape)
                raise InputError(f"export: {tensor.name} has shape {found}, the model's is {list(tensor.shape)}")
        _atomically(folder / name, lambda path, data=tensors: save_file(data, path, metadata={"format": "pt"}))  # type: ignore[misc]
        weight_map.update(dict.fromkeys(tensors, name))
        written.append(folder / name)
    if len(shards) > 1:
        total = sum(tensor.count for shard in shards for tensor in shard) * dtype.itemsize
        written.append(_write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}))
    written.append(_write_json(folder / "config.json", config))
    return written


def _shards(spec: ModelSpec, item_bytes: int, most: int) -> Iterator[list[HuggingFaceTensor]]:
    shard: list[HuggingFaceTensor] = []
    for tensor in hugging_face_tensors(spec):
        if shard and (sum(other.count for other in shard) + tensor.count) * item_bytes > most:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _write_json(path: Path, value: object) -> Path:
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    _atomically(path, lambda partial: Path(partial).write_text(text, encoding="utf-8"))
    return path


def _atomically(path: Path, write: Callable[[str], object]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    write(str(partial))
    os.replace(partial, path)
