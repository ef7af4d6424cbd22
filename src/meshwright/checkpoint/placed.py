"""What a checkpoint holds: tensors with a role, a full name, and a place in the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.checkpoint.boxes import Box

Role = Literal["parameter", "exp_avg", "exp_avg_sq", "momentum", "previous", "sync"]
"""Parameter (the master value), AdamW's two moments, SGD's momentum; the parameter before the last update, where
gradients are one update late; what synchronisation remembers."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types by the names that safetensors gives them."""
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class PlacedTensor:
    """A box of a named tensor: to be saved from ``tensor``, or to be loaded into it.

    ``tensor`` has the box's ``sizes`` as its shape, or is flat and contiguous with as many elements.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor
    role: Role = "parameter"

    def __post_init__(self) -> None:
        inside = len(self.global_shape) == len(self.offsets) == len(self.sizes) and all(
            offset >= 0 and size >= 0 and offset + size <= extent
            for offset, size, extent in zip(self.offsets, self.sizes, self.global_shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"{self.key}: box at {self.offsets} of {self.sizes} is not inside shape {self.global_shape}"
            )
        if self.tensor.numel() != math.prod(self.sizes):
            raise ValueError(f"{self.key}: {self.tensor.numel()} elements do not fill a box of {self.sizes}")
        if self.tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{self.key}: {self.tensor.dtype} cannot be saved; use one of {', '.join(DTYPES)}")

    @property
    def key(self) -> str:
        """``role/full name``: what the checkpoint calls the whole tensor."""
        return f"{self.role}/{self.name}"

    @property
    def box(self) -> Box:
        """Offsets and sizes."""
        return self.offsets, self.sizes

    @property
    def boxed(self) -> Tensor:
        """The elements in the shape of the box, sharing storage with ``tensor``."""
        return self.tensor if self.tensor.shape == self.sizes else self.tensor.view(self.sizes)


def whole(name: str, tensor: Tensor, role: Role = "parameter") -> PlacedTensor:
    """A tensor that is all of itself."""
    shape = tuple(tensor.shape)
    return PlacedTensor(name, shape, tuple(0 for _ in shape), shape, tensor, role)
