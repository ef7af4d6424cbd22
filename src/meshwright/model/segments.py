"""Which part of which logical parameter a rank stores, and where in its physical parameter."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """One box of one logical (full, named) parameter inside a physical parameter of this rank.

    Physical parameters may hold several logical ones (fused q, k, v) and only this rank's slice of
    each. The box is stored contiguously, row-major, from element ``start`` of the flattened physical
    parameter. Physical elements in no segment are padding: always zero, never saved.
    """

    name: str
    """Logical full name, e.g. ``layers.3.attention.q.weight``."""
    shape: tuple[int, ...]
    """Global logical shape."""
    offsets: tuple[int, ...]
    """Where the box starts in the logical tensor."""
    sizes: tuple[int, ...]
    """Extents of the box (1-D or 2-D)."""
    start: int
    """First element of the box in the flattened physical parameter."""

    @property
    def count(self) -> int:
        """Number of elements in the box."""
        return prod(self.sizes)

    @property
    def whole(self) -> bool:
        """Whether the box is the entire logical tensor."""
        return self.sizes == self.shape

    def box(self, physical: Tensor) -> Tensor:
        """The box as a view into ``physical`` (contiguous), shaped ``sizes``."""
        return physical.view(-1).narrow(0, self.start, self.count).view(self.sizes)

    def cut(self, logical: Tensor) -> Tensor:
        """The box as a view into the whole logical tensor, shaped ``sizes``."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            logical = logical.narrow(dimension, offset, size)
        return logical
