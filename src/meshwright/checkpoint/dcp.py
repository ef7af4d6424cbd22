"""Tensors out of a checkpoint of ``torch.distributed.checkpoint`` (DCP), without running anything that is in it.

Its index, ``.metadata``, is a pickle. It is read by an unpickler that knows the dozen names such an index consists of
and gives each a record that does nothing; any other name is refused. The tensors are read by ``torch.load`` with
``weights_only=True``, or as safetensors. Objects that are not tensors stay unread.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from meshwright.checkpoint.boxes import Box, cover_problem, inside
from meshwright.checkpoint.placed import DTYPE_NAMES, DTYPES
from meshwright.errors import CheckpointError, DamagedCheckpoint

INDEX = ".metadata"


class _Record:
    """Stands for every object of the index: holds what it was given, and does nothing."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.values = (state,)


_PREFIX = "torch.distributed.checkpoint."
_RECORDS = {
    (_PREFIX + "metadata", "Metadata"),
    (_PREFIX + "metadata", "TensorStorageMetadata"),
    (_PREFIX + "metadata", "BytesStorageMetadata"),
    (_PREFIX + "metadata", "ChunkStorageMetadata"),
    (_PREFIX + "metadata", "TensorProperties"),
    (_PREFIX + "metadata", "_MEM_FORMAT_ENCODING"),
    (_PREFIX + "metadata", "MetadataIndex"),
    (_PREFIX + "metadata", "StorageMeta"),
    (_PREFIX + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs")

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


@dataclass(frozen=True)
class _Chunk:
    """One box of a tensor, in bytes ``begin`` to ``begin + bytes`` of a file."""

    box: Box
    file: str
    begin: int
    bytes: int


@dataclass(frozen=True)
class DcpTensor:
    """One whole tensor: its element type (by safetensors' name), shape, and where its boxes lie."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


class DcpFolder:
    """The tensors of one DCP checkpoint.

    Attributes:
        tensors: by name.
        objects: names of what is no tensor, and is not read.

    Raises:
        CheckpointError: it is no such checkpoint, or its index holds what no index of tensors needs.
        DamagedCheckpoint: the index cannot be read to its end, or a tensor has holes.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / INDEX
        index = self._index()
        try:
            self.tensors, self.objects = self._tensors(index)
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise CheckpointError(f"import: {self.path} is not an index of this format ({error!r})") from None
        for name, tensor in self.tensors.items():
            problem = cover_problem(tensor.shape, [chunk.box for chunk in tensor.chunks])
            if problem:
                raise DamagedCheckpoint(f"import: {self.path}: {name}: {problem}; use another checkpoint")

    def _index(self) -> Any:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(
                f"import: {self.folder} has no {INDEX}, so it is no checkpoint of torch.distributed.checkpoint or its "
                "save did not finish; a Hugging Face folder needs no import, give it as model.init_from"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"import: {self.path} cannot be read ({error.strerror}); give the folder of a checkpoint of "
                "torch.distributed.checkpoint"
            ) from None
        try:
            return _IndexUnpickler(io.BytesIO(data)).load()
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"import: {self.path} is refused: {error}") from None
        except Exception as error:  # a cut or changed pickle fails in any way
            raise DamagedCheckpoint(
                f"import: {self.path} is damaged ({type(error).__name__}: {error}); use another checkpoint"
            ) from None

    def _tensors(self, index: Any) -> tuple[dict[str, DcpTensor], list[str]]:
        places: dict[tuple[str, tuple[int, ...]], Any] = {}
        for key, place in index.storage_data.items():
            places[key.fqn, tuple(getattr(key, "offset", None) or ())] = place
        found: dict[str, DcpTensor] = {}
        objects = []
        for name, entry in index.state_dict_metadata.items():
            if type(entry).__name__ != "TensorStorageMetadata":
                objects.append(name)
                continue
            dtype = entry.properties.values[0][0] if entry.properties.values else entry.properties.dtype
            if dtype not in DTYPE_NAMES:
                raise ValueError(f"{name} has type {dtype}")
            chunks = tuple(self._chunk(name, chunk, places) for chunk in entry.chunks)
            found[name] = DcpTensor(DTYPE_NAMES[dtype], tuple(entry.size), chunks)
        return found, objects

    def _chunk(self, name: str, chunk: Any, places: dict[tuple[str, tuple[int, ...]], Any]) -> _Chunk:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        place = places[name, offsets]
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"file name {place.relative_path!r} leaves the folder")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"{name} is transformed by {place.transform_descriptors}")
        return _Chunk((offsets, sizes), place.relative_path, int(place.offset), int(place.length))

    def read(self, name: str) -> Tensor:
        """One whole tensor, on the host.

        Raises:
            DamagedCheckpoint: a file is missing, cut short, or holds something else than the index says.
        """
        entry = self.tensors[name]
        whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        origin = tuple(0 for _ in entry.shape)
        for chunk in entry.chunks:
            part = self._part(name, chunk)
            if tuple(part.shape) != chunk.box[1] or part.dtype != whole.dtype:
                raise self._damaged(chunk, f"{name} is {part.dtype} {list(part.shape)} there")
            whole[inside(chunk.box, origin)] = part
        return whole

    def _part(self, name: str, chunk: _Chunk) -> Tensor:
        path = self.folder / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.begin)
                data = file.read(chunk.bytes)
            if len(data) != chunk.bytes:
                raise self._damaged(chunk, f"it ends before {name} does")
            if data[:2] == b"PK":
                value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            else:
                (value,) = safetensors.torch.load(data).values()
        except OSError as error:
            raise self._damaged(chunk, f"cannot be read: {error.strerror}") from None
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
            raise self._damaged(chunk, f"{name}: {str(error).splitlines()[0][:200]}") from None
        if not isinstance(value, Tensor):
            raise self._damaged(chunk, f"{name} is no tensor there")
        return value.reshape(chunk.box[1]) if value.numel() == math.prod(chunk.box[1]) else value

    def _damaged(self, chunk: _Chunk, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"import: {self.folder / chunk.file} is damaged at byte {chunk.begin} ({what}); use another checkpoint"
        )
