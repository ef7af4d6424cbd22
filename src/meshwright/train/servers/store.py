"""What a server holds: its chunks of the parameters and the optimizer's state for them, updated as everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.load import read_box
from meshwright.checkpoint.manifest import Manifest, read_manifest
from meshwright.checkpoint.placed import PlacedTensor, Role
from meshwright.job.job import Job
from meshwright.model.initialise import initialise
from meshwright.model.transformer import StageModel
from meshwright.parallel.owned import Owned
from meshwright.sync.server.placement import Chunk
from meshwright.train.initial_weights import load_weights
from meshwright.train.norm import OrderFreeSquares, local_peak
from meshwright.train.optimizer import AdamW, make_optimizer, variance_steps
from meshwright.train.placement import placements
from meshwright.train.servers.shapes import Shapes


class ShardStore:
    """``sync.server.store.Store`` over owned ranges, with the optimizer and the norm of every other layout.

    Args:
        shapes: of the job.
        shard: whose chunks.
        values: the starting values of each chunk, in the master type; they become the masters.
    """

    def __init__(self, shapes: Shapes, shard: int, values: Sequence[Tensor]) -> None:
        self.shapes = shapes
        self.owned = owned_ranges(shapes, shapes.shards[shard], values)
        self.frozen_updates = 0
        """Updates before this run that left the second moments as they were (1-bit Adam); none of ours does."""
        optimizer = shapes.job.optimizer
        self.optimizer = make_optimizer(
            self.owned,
            name=optimizer.name,
            betas=optimizer.betas,
            eps=optimizer.eps,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
        )

    @property
    def updates(self) -> int:
        """Optimizer steps applied."""
        return self.optimizer.steps

    @updates.setter
    def updates(self, number: int) -> None:
        self.optimizer.steps = number
        if isinstance(self.optimizer, AdamW):
            self.optimizer.variance_steps = number - self.frozen_updates

    def values(self) -> list[Tensor]:
        """Copies of the masters in the type of forward and backward."""
        return [piece.master.to(self.shapes.compute_dtype, copy=True) for piece in self.owned]

    def add_up(self, parts: Sequence[Sequence[Tensor]]) -> float:
        """``gradient = ((parts[0] + parts[1]) + parts[2]) + ...``; the largest absolute element."""
        for index, piece in enumerate(self.owned):
            first, *rest = (part[index] for part in parts)
            if rest:
                torch.add(first, rest.pop(0), out=piece.gradient)
            else:
                piece.gradient.copy_(first)
            for each in rest:
                piece.gradient.add_(each)
        peak = local_peak(self.owned)
        return math.inf if math.isnan(peak) else peak

    def squares(self, peak: float) -> tuple[float, float]:
        """See ``Store.squares``; exact sums, so their grouping does not show (``train.norm``)."""
        return OrderFreeSquares(peak, self.shapes.job.model_spec.parameter_count).local(self.owned)

    def update(self, rate: float, factor: float) -> None:
        """Scale and step."""
        if factor != 1.0:
            torch._foreach_mul_([piece.gradient for piece in self.owned], factor)
        self.optimizer.step(rate)

    def state(self) -> list[Tensor]:
        """Masters, then the optimizer's tensors role by role."""
        moments = self.optimizer.state().values()
        return [piece.master for piece in self.owned] + [tensor for tensors in moments for tensor in tensors]

    def restore(self, tensors: Sequence[Tensor], updates: int) -> None:
        """See ``Store.restore``."""
        for mine, other in zip(self.state(), tensors, strict=True):
            mine.copy_(other)
        self.updates = updates


def owned_ranges(shapes: Shapes, chunks: Sequence[Chunk], values: Sequence[Tensor]) -> list[Owned]:
    """Chunks as what an optimizer updates; ``values`` become the masters."""
    return [
        Owned(
            parameter=f"stage0:{chunk.parameter}",
            start=chunk.start,
            master=value,
            gradient=torch.zeros_like(value),
            decay=chunk.parameter in shapes.matrices,
            counted=True,
            tp_replicated=False,
        )
        for chunk, value in zip(chunks, values, strict=True)
    ]


def placed(shapes: Shapes, piece: Owned, flat: Tensor, role: Role) -> list[PlacedTensor]:
    """The named boxes of one owned range, for a checkpoint."""
    return [
        PlacedTensor(place.name, place.shape, place.offsets, place.sizes, flat[place.start : place.stop], role)
        for place in placements(piece, shapes.segments(piece.name))
    ]


def fresh_store(shapes: Shapes, shard: int) -> ShardStore:
    """A shard at the start of a run: from the seed, or from the weights the job names."""
    return ShardStore(shapes, shard, _starting_values(shapes.job, shapes, shapes.shards[shard]))


def _starting_values(job: Job, shapes: Shapes, chunks: Sequence[Chunk]) -> list[Tensor]:
    spec = job.model_spec
    model = StageModel(spec, range(spec.layers), first=True, last=True).to(shapes.master_dtype)
    if job.model.init_from is not None:
        load_weights(model, Path(job.model.init_from))
    else:
        initialise(model, job.train.seed)
    parameters = dict(model.named_parameters())
    return [parameters[chunk.parameter].detach().view(-1)[chunk.start : chunk.stop].clone() for chunk in chunks]


def resumed_store(shapes: Shapes, shard: int, checkpoint: Path) -> ShardStore:
    """A shard as a checkpoint has it, whatever layout or strategy wrote that; only its boxes are read.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    chunks = shapes.shards[shard]
    store = ShardStore(shapes, shard, [torch.zeros(chunk.count, dtype=shapes.master_dtype) for chunk in chunks])
    manifest = read_manifest(checkpoint)
    for index, piece in enumerate(store.owned):
        _read(manifest, shapes, piece, piece.master, "parameter")
        for role, tensors in store.optimizer.state().items():
            _read(manifest, shapes, piece, tensors[index], role)  # type: ignore[arg-type]
    updates = int(manifest.state["optimizer_steps"])
    store.frozen_updates = updates - variance_steps(manifest.state)
    store.updates = updates
    return store


def _read(manifest: Manifest, shapes: Shapes, piece: Owned, flat: Tensor, role: Role) -> None:
    for place in placements(piece, shapes.segments(piece.name)):
        place.view(flat).copy_(read_box(manifest, place.name, place.offsets, place.sizes, role))
