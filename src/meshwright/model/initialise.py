"""Initial values: each a function of (seed, logical name, element index), so every layout starts from the same bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.job.model_spec import ModelSpec
from meshwright.model.philox import derive_key, normal
from meshwright.model.segments import Segment
from meshwright.model.transformer import StageModel

_CHUNK_ELEMENTS = 1 << 16
"""Elements drawn at a time: bounds the memory of initialisation to a few MiB."""

_RESIDUAL = ("attention.output.weight", "mlp.down.weight")


def initialise(model: StageModel, seed: int) -> None:
    """Fill every parameter of a stage in place; only this rank's slices are computed; padding becomes zero."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for fqn, segments in model.segments.items():
            fill(parameters[fqn].data, segments, model.spec, seed)


def fill(physical: Tensor, segments: tuple[Segment, ...], spec: ModelSpec, seed: int) -> None:
    """Fill one physical parameter (contiguous) from its segments."""
    if sum(segment.count for segment in segments) != physical.numel():
        physical.zero_()
    for segment in segments:
        _fill_box(segment.box(physical), segment, spec, seed)


def _fill_box(box: Tensor, segment: Segment, spec: ModelSpec, seed: int) -> None:
    if segment.name.endswith(".bias"):
        box.zero_()
        return
    if len(segment.shape) == 1:
        box.fill_(1.0)
        return
    deviation = spec.init_std
    if spec.residual_init_scale and segment.name.endswith(_RESIDUAL):
        deviation /= math.sqrt(2 * spec.layers)
    key = derive_key(seed, segment.name)
    rows, width = segment.sizes
    columns = segment.shape[1]
    step = max(1, _CHUNK_ELEMENTS // max(1, width))
    for row in range(0, rows, step):
        count = min(step, rows - row)
        starts = (torch.arange(count, device=box.device) + (segment.offsets[0] + row)) * columns + segment.offsets[1]
        box[row : row + count] = normal(key, starts, width).mul_(deviation)
