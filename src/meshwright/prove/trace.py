"""The traced ledger: the real training program of any rank, run on fake tensors, without the other ranks.

    fake process group      world size and this rank; a collective returns at once and moves nothing
    fake tensors            shapes, strides, storages; no memory, no values
    stated values           for what the program reads back from a tensor: see ``prove.no_values``
    recorder                the same as in the measured ledger

Nothing else is different: the same ``Trainer`` builds the same model on the same mesh and runs the same step, so the
ledger of rank 9,000 of 16,384 takes one process and seconds. It is the program for CPU ranks that is traced
(direct exchanges of ``comm.collectives``), whatever ``cluster.device`` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch
from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.job.schedule_rules import micro_steps
from meshwright.job.steady import steady_step
from meshwright.ledger.ledger import Ledger, RankLedger
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.prove.no_values import NoValues
from meshwright.train.delayed import make_trainer
from meshwright.train.measured import instruments_for
from meshwright.train.trainer import Trainer


def trace(job: Job, ranks: Sequence[int]) -> Ledger:
    """What the program of these ranks stores, computes and sends in one steady step.

    Args:
        job: resolved.
        ranks: of ``job.layout``; each is traced by itself.

    Raises:
        InputError: the layout has no such rank.
        RuntimeError: this process is in a process group already.
    """
    layout = job.layout
    for rank in ranks:
        if not 0 <= rank < layout.ranks:
            raise InputError(f"rank: {rank} is not a rank of layout {layout}; use 0 to {layout.ranks - 1}")
    entries = tuple(_trace_rank(job, rank) for rank in ranks)
    return Ledger(source="traced", layout=str(layout), world=layout.ranks, backend="gloo", ranks=entries)


def _trace_rank(job: Job, rank: int) -> RankLedger:
    layout = job.layout
    assert layout.micro_batch is not None
    micro_batches = micro_steps(job.batch.global_size, layout.micro_batch, layout.dp)
    uncompiled = job.train.model_copy(update={"compile": False})
    with _alone_as(rank, layout.ranks), Mesh(layout) as mesh, FakeTensorMode():
        trainer = make_trainer(job.model_copy(update={"train": uncompiled}), mesh, abstract=True)
        with NoValues():
            _do_first_things(trainer, job, micro_batches)
            counted = steady_step(job, 1)
            _begin_sums(trainer, job, counted)
            trainer.step_number = counted - 1
            instruments = instruments_for(trainer)
            with instruments.counting() as recorder:
                if job.layout.delayed:
                    # A steady step begins while the one before is under way.
                    trainer.advance(_batches(job, micro_batches), drain=False)
                    recorder.restart()
                trainer.advance(_batches(job, micro_batches), drain=False)
        return instruments.entry()


def _do_first_things(trainer: Trainer, job: Job, micro_batches: int) -> None:
    """What the first step does besides what every step does, so that the next one is a steady one."""
    if isinstance(trainer.executor, PipelineExecutor) and not job.layout.delayed:
        trainer.executor.prepare(_batches(job, micro_batches))
    if job.layout.zero >= 2 and job.layout.shard_degree > 1:
        # The first forward pass makes FSDP2's gather buffers; the last line frees them again.
        trainer.executor.evaluate(_batches(job, 1), 1.0)
        trainer.data_parallel.publish()


def _begin_sums(trainer: Trainer, job: Job, counted: int) -> None:
    """Where outer gradients travel for some steps: what the steps before the counted one have sent on its way."""
    if trainer.apart is not None:
        for step in range(counted - job.sync.overlap, counted):
            trainer.apart.after(step, 1)


@contextmanager
def _alone_as(rank: int, ranks: int) -> Iterator[None]:
    """This process as one rank of a world whose other ranks do not exist."""
    if dist.is_initialized():
        raise RuntimeError("trace: this process is in a process group already; trace in a process of its own")
    # Importing it registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _batches(job: Job, number: int) -> list[Batch]:
    """One rank's micro-batches; with document numbers where the job masks documents."""
    assert job.layout.micro_batch is not None
    rows, length = job.layout.micro_batch, job.data.sequence_length

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64)

    return [
        Batch(
            tokens=numbers(rows, length),
            labels=numbers(rows, length),
            positions=numbers(rows, length),
            documents=numbers(rows, length) if job.data.document_mask else None,
            examples=numbers(rows),
        )
        for _ in range(number)
    ]
