"""What a rank's optimizer updates, and the four things a training step asks of data parallelism.

Every way to spread the model's state over the dp ranks (replicated, ZeRO-1, 2, 3; with or without
replicas of the shards) answers the same two questions: *which elements are mine to update*
(:class:`Owned`) and *when do their gradients hold the sum over all dp ranks* (:class:`DataParallel`).
The optimizer, the norm, the loss scaler and the checkpoint know nothing else of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

BackwardPart = Literal["whole", "input", "weight"]
"""Which part of a backward pass runs: all of it, or, in schedules that split it, one half."""


@dataclass
class Owned:
    """One contiguous range of one physical parameter that this rank updates.

    Over all ranks of the model, the ranges with ``counted`` set hold every element exactly once:
    summing over them gives the global gradient norm, saving them gives the checkpoint. Ranges that are
    updated on several ranks (ZeRO-0, replicas of shards, parameters whole on every tp rank, the second
    copy of a tied embedding) are counted on one.
    """

    parameter: str
    """Physical name, prefixed by its stage: ``stage3:layers.7.attention.qkv.weight``."""
    start: int
    """First element in this rank's flattened physical parameter."""
    master: Tensor
    """``[count]``, float32 (float64 when training in it): the values the optimizer updates."""
    gradient: Tensor
    """``[count]``, same dtype; the sum over dp and micro-batches once ``finish_gradients`` has returned.

    The tensor is the same object from step to step; it may be scaled in place.
    """
    decay: bool
    """Weight decay applies (matrices; not biases and norms)."""
    counted: bool
    """This rank speaks for the range in norms and checkpoints."""
    tp_replicated: bool
    """The whole parameter stands on every tp rank, each with a part of the gradient."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.master.numel()

    @property
    def stage(self) -> int:
        """The pipeline stage the parameter belongs to."""
        return int(self.parameter.removeprefix("stage").partition(":")[0])

    @property
    def name(self) -> str:
        """The physical name inside the stage's module."""
        return self.parameter.partition(":")[2]


class DataParallel(Protocol):
    """How gradients of the dp ranks become one, and updated masters become the parameters of the next step.

    Gradients are plain sums: the loss is already divided by the valid tokens of the global batch.

        begin_step -> (micro_batch: forward, backward)* -> finish_gradients -> [optimizer] -> publish
    """

    def owned(self) -> list[Owned]:
        """What this rank updates, in a fixed order; the same list every time."""

    def gradient_buffers(self) -> list[Tensor]:
        """All memory held for gradients from step to step: more than the owned ranges where those are parts of it."""

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""

    def micro_batch(
        self, *, last: bool, stage: int | None = None, part: BackwardPart = "whole"
    ) -> AbstractContextManager[None]:
        """Surround one backward pass (the forward may be inside too).

        Args:
            last: no further backward pass of the stage follows in this step, so its gradients may
                travel as soon as they are complete.
            stage: the stage it runs through; absent: this rank's only one.
            part: schedules that split the backward pass surround each half.
        """

    def collect(self, stage: int) -> None:
        """Take in gradients that stand in ``.grad``: split backward passes set it without calling hooks."""

    def finish_gradients(self) -> None:
        """Return when every ``Owned.gradient`` holds the sum over dp ranks and micro-batches.

        A parameter that got no gradient counts as zero; every rank takes part in every exchange.
        """

    def publish(self) -> None:
        """Make the updated masters the parameters that the next forward pass uses."""
