"""A worker's model: parameters come from the servers, gradients go to them; the arithmetic is every layout's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch, ceil_div, micro_batches
from meshwright.data.order import Order
from meshwright.data.packing import IGNORE
from meshwright.data.samples import Samples
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.model.dropout import Randomness
from meshwright.sync.server.client import Gradient
from meshwright.sync.server.modes import Work
from meshwright.train.build import build
from meshwright.train.executor import LoopExecutor
from meshwright.train.servers.shapes import Shapes


class Computing:
    """``sync.server.client.Compute`` over a model of one rank.

    Args:
        job: resolved; dp is the number of workers.
        training, validation: the samples.
        order: which sample stands at which position; absent: by the job's seed.
    """

    def __init__(self, job: Job, training: Samples, validation: Samples | None, order: Order | None = None) -> None:
        self.job, self.training, self.validation = job, training, validation
        self.shapes = Shapes(job)
        self._order = order or Order(len(training), job.train.seed)
        alone = job.model_copy(
            update={"layout": Layout(micro_batch=job.layout.micro_batch, recompute=job.layout.stage_recompute(0))}
        )
        self._mesh = Mesh(alone.layout)
        built = build(alone, self._mesh, torch.device("cpu"))
        self.module, self._data_parallel = built.stages[0], built.data_parallel
        self._executor = LoopExecutor(self.module, self._data_parallel)
        self._parameters = {name: parameter.data.view(-1) for name, parameter in self.module.named_parameters()}
        self._gradients = {piece.name: piece.gradient for piece in self._data_parallel.owned()}
        self._pushes = job.layout.dp if job.sync.server_mode == "asynchronous" else 1

    def load(self, shards: Sequence[Sequence[Tensor]]) -> None:
        """See ``Compute.load``: straight into what forward reads."""
        for chunks, tensors in zip(self.shapes.shards, shards, strict=True):
            for chunk, tensor in zip(chunks, tensors, strict=True):
                self._parameters[chunk.parameter][chunk.start : chunk.stop].copy_(tensor)

    def gradient(self, work: Work) -> Gradient:
        """See ``Compute.gradient``."""
        indices = self._order.samples(work.first, work.count)
        batches = self._batches(self.training, indices, work)
        divisor = float(max(1, self._valid(indices))) if work.whole else 1.0
        self.module.randomness = Randomness(self.job.train.seed, work.clock // self._pushes)
        self._data_parallel.begin_step()
        losses = self._executor.run(batches, divisor)
        self._data_parallel.finish_gradients()
        parts = [
            [self._gradients[chunk.parameter][chunk.start : chunk.stop] for chunk in chunks]
            for chunks in self.shapes.shards
        ]
        values = [float(loss) for loss in losses if loss is not None]
        return Gradient(parts, values, sum(batch.valid_tokens for batch in batches))

    def _batches(self, samples: Samples, indices: NDArray[np.int64], work: Work) -> list[Batch]:
        assert self.job.layout.micro_batch is not None  # the job is resolved
        slot = work.slot if work.slots > 1 else 0
        return micro_batches(samples, indices, work.count, self.job.layout.micro_batch, slot, work.slots)

    def _valid(self, indices: NDArray[np.int64]) -> int:
        """Valid tokens of all these samples, whoever computes them."""
        return int((self.training.rows(indices).labels != IGNORE).sum())

    def validate(self, part: int, parts: int) -> tuple[float, int]:
        """See ``Compute.validate``; batches of the size of a step's."""
        samples, size = self.validation, self.job.batch.global_size
        if samples is None:
            return 0.0, 0
        total, tokens = 0.0, 0
        for number in range(part, ceil_div(len(samples), size), parts):
            indices = np.arange(number * size, min((number + 1) * size, len(samples)), dtype=np.int64)
            batches = self._batches(samples, indices, Work(0, 0, size, 0, 1, whole=False))
            total += sum(float(loss) for loss in self._executor.evaluate(batches, 1.0) if loss is not None)
            tokens += sum(batch.valid_tokens for batch in batches)
        return total, tokens

    def close(self) -> None:
        """Give the groups back."""
        self._mesh.close()


def join_alone() -> None:
    """A process group of this process alone: what the model's parts ask for, without any network."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
