"""16-bit floats on the wire: half the bytes of float32, a quarter of float64.

Sums are taken in the wide type (``sync.two_stage``), so what a number loses is one rounding each way:

    float16     |error| <= 2^-11 |x|    from 2^-14 up; below, 2^-25 at most; above 65,504 it would be infinite, so
                                        values are held there and the residual keeps the rest
    bfloat16    |error| <= 2^-8 |x|     in the range of float32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.sync.codec import as_bytes

_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Cast:
    """Each number as a 16-bit float; no scales."""

    kind: Literal["fp16", "bf16"]

    @property
    def _narrow(self) -> torch.dtype:
        return torch.float16 if self.kind == "fp16" else torch.bfloat16

    def encode(self, rows: Tensor, key: int) -> Tensor:
        """See ``Codec.encode``."""
        if self.kind == "fp16":
            # What is infinite stays so: all ranks must see that the step is not to be applied.
            rows = torch.where(rows.isinf(), rows, rows.clamp(-_LARGEST_HALF, _LARGEST_HALF))
        return as_bytes(rows.to(self._narrow))

    def decode(self, payload: Tensor, count: int, wide: torch.dtype) -> Tensor:
        """See ``Codec.decode``."""
        return payload.contiguous().view(self._narrow).view(payload.shape[0], count).to(wide)
