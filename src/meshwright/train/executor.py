"""Runs the micro-batches of one step on one rank when the model is not cut into stages."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from meshwright.comm.position import in_micro_batch
from meshwright.comm.record import phase
from meshwright.data.batch import Batch
from meshwright.model.transformer import StageModel
from meshwright.parallel.owned import DataParallel


class Executor(Protocol):
    """Forward and backward over the micro-batches of one step."""

    def run(self, batches: list[Batch], divisor: float) -> list[Tensor | None]:
        """Accumulate gradients of ``sum over valid tokens / divisor``; the loss of each micro-batch where known."""

    def evaluate(self, batches: list[Batch], divisor: float) -> list[Tensor | None]:
        """The losses alone; gradients and training state stay as they are."""


class LoopExecutor:
    """Micro-batch after micro-batch: forward, loss, backward."""

    def __init__(self, module: StageModel, data_parallel: DataParallel) -> None:
        self._module, self._data_parallel = module, data_parallel

    def run(self, batches: list[Batch], divisor: float) -> list[Tensor | None]:
        """See ``Executor.run``."""
        losses: list[Tensor | None] = []
        for index, batch in enumerate(batches):
            in_micro_batch(index)
            with self._data_parallel.micro_batch(last=index == len(batches) - 1):
                with phase("forward"):
                    loss = self._module(None, batch, divisor)
                with phase("backward"):
                    loss.backward()
            losses.append(loss.detach())
        return losses

    @torch.no_grad()
    def evaluate(self, batches: list[Batch], divisor: float) -> list[Tensor | None]:
        """See ``Executor.evaluate``."""
        self._module.eval()
        with phase("evaluate"):
            losses: list[Tensor | None] = [self._module(None, batch, divisor) for batch in batches]
        self._module.train()
        return losses
