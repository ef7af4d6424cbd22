"""Where each owned range of this rank lies in the named parameters of the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from meshwright.checkpoint.boxes import boxes_of_flat_range
from meshwright.model.segments import Segment
from meshwright.model.transformer import StageModel
from meshwright.parallel.owned import Owned


@dataclass(frozen=True)
class Placement:
    """A box of a named parameter, stored contiguously in ``[start, stop)`` of an owned range."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int

    def view(self, flat: Tensor) -> Tensor:
        """The box as a view of a flat tensor that runs parallel to the owned range."""
        return flat[self.start : self.stop].view(self.sizes)


def segments_of(stages: dict[int, StageModel], parameter: str) -> tuple[Segment, ...]:
    """The named boxes that the physical parameter ``stage{n}:{name}`` is made of."""
    stage, name = parameter.split(":", 1)
    return tuple(stages[int(stage.removeprefix("stage"))].segments[name])


def placements(piece: Owned, segments: Sequence[Segment]) -> Iterator[Placement]:
    """Every named box in one owned range; padding belongs to none."""
    first, last = piece.start, piece.start + piece.master.numel()
    for segment in segments:
        size = math.prod(segment.sizes)
        begin, end = max(first, segment.start), min(last, segment.start + size)
        if begin >= end:
            continue
        position = begin - first
        for offsets, sizes in boxes_of_flat_range(segment.sizes, begin - segment.start, end - segment.start):
            count = math.prod(sizes)
            yield Placement(
                name=segment.name,
                shape=segment.shape,
                offsets=tuple(o + s for o, s in zip(segment.offsets, offsets, strict=True)),
                sizes=tuple(sizes),
                start=position,
                stop=position + count,
            )
            position += count
