"""The recursion that 2BW must follow, in plain data parallelism: each gradient taken one update late."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.parallel.owned import Owned
from meshwright.prove.layout_run import Box, boxes
from meshwright.prove.parity import Trace, assemble
from meshwright.prove.pool import RankPool
from meshwright.train.trainer import Trainer
from meshwright.train.worker import prepare_determinism
from tests.small_jobs import my_batches

Ran = tuple[list[float], list[float], list[Box]]


def spoil(trainer: Trainer, step: int | None) -> None:
    """Make the gradients of one step (from 0) infinite."""

    def infinite(owned: list[Owned]) -> None:
        if trainer.step_number == step:
            for piece in owned:
                piece.gradient.fill_(math.inf)

    trainer.after_reduction.append(infinite)


def on_rank(job: Job, steps: int, bad_step: int | None) -> Ran:
    """Losses, norms and newest parameters of ``W_{t+1} = W_t - update(gradient at W_{t-1})``."""
    prepare_determinism(job)
    losses, norms = [], []
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        spoil(trainer, bad_step)
        newest = previous = [piece.master.clone() for piece in trainer.owned]

        def show(values: Sequence[Tensor]) -> None:
            for piece, value in zip(trainer.owned, values, strict=True):
                piece.master.copy_(value)

        def update_the_newest(_: list[Owned]) -> None:
            show(newest)

        trainer.after_reduction.append(update_the_newest)
        for step in range(steps):
            show(previous)
            trainer.publish()
            report = trainer.step(my_batches(job, mesh, step))
            losses.append(report.loss)
            norms.append(report.gradient_norm)
            previous, newest = newest, [piece.master.clone() for piece in trainer.owned]
        return losses, norms, boxes(trainer, trainer.owned, lambda piece: piece.master)


def recursion(ranks: Callable[[int], RankPool], job: Job, steps: int, bad_step: int | None = None) -> Trace:
    """The same as whole tensors."""
    ran = ranks(job.layout.ranks).run(on_rank, job, steps, bad_step)
    return Trace(ran[0][0], ran[0][1], [], assemble([one[2] for one in ran]))
