"""What a rank does in a proof: train a few steps under a layout and hand back everything it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch
from meshwright.data.loader import Loader
from meshwright.job.job import Job
from meshwright.job.split import Split, first_split, split_into
from meshwright.parallel.owned import Owned
from meshwright.prove.parity import Trace, assemble, to_numpy
from meshwright.prove.planted import Plant, plant
from meshwright.prove.pool import RankPool
from meshwright.prove.proof_data import ProofSamples, proof_batches
from meshwright.train.delayed import make_trainer
from meshwright.train.placement import placements, segments_of
from meshwright.train.trainer import Trainer
from meshwright.train.worker import prepare_determinism

Box = tuple[str, tuple[int, ...], tuple[int, ...], NDArray[Any]]


@dataclass(frozen=True)
class Request:
    """A run of a few steps of ``job`` under its own layout.

    ``samples`` replaces the job's corpus; ``planted`` makes a named error on purpose. ``sequences``: of each replica,
    step by step and round again, in place of what the job's ``batch.split`` says.
    """

    job: Job
    steps: int
    samples: ProofSamples | None = None
    gradient_steps: int = 0
    planted: Plant | None = None
    sequences: tuple[tuple[int, ...], ...] = ()


@dataclass
class RankTrace:
    """What one rank saw; gradients hold only the elements this rank counts, so each is sent once."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[list[Box]] = field(default_factory=list)
    parameters: list[Box] = field(default_factory=list)


def train_on_rank(request: Request) -> RankTrace:
    """Runs on every rank of a pool."""
    prepare_determinism(request.job)
    trace = RankTrace()
    with Mesh(request.job.layout) as mesh:
        trainer = make_trainer(request.job, mesh)
        if request.planted is not None:
            plant(request.planted, trainer)

        def keep_gradients(owned: list[Owned]) -> None:
            if trainer.step_number < request.gradient_steps:
                counted = [piece for piece in owned if piece.counted]
                trace.gradients.append(boxes(trainer, counted, lambda piece: piece.gradient))

        trainer.after_reduction.append(keep_gradients)
        batches_of = batch_source(request, mesh)
        for step in range(request.steps):
            for report in trainer.advance(batches_of(step), drain=step == request.steps - 1):
                trace.losses.append(report.loss)
                trace.norms.append(report.gradient_norm)
        trace.parameters = boxes(trainer, trainer.owned, lambda piece: piece.master)
    return trace


def boxes(trainer: Trainer, owned: list[Owned], tensor_of: Callable[[Owned], Any]) -> list[Box]:
    """Copies of the named boxes in these owned ranges."""
    result: list[Box] = []
    for piece in owned:
        flat = tensor_of(piece)
        for place in placements(piece, segments_of(trainer.stages, piece.parameter)):
            result.append((place.name, place.shape, place.offsets, to_numpy(place.view(flat))))
    return result


def batch_source(request: Request, mesh: Mesh | None) -> Callable[[int], list[Batch]]:
    """Micro-batches by step for this rank, or for one device (``mesh`` absent: the whole global batch)."""
    job = request.job
    dp_rank, dp = (mesh.coordinate("dp"), mesh.degree("dp")) if mesh else (0, 1)
    assert job.layout.micro_batch is not None
    if request.samples is None:
        return Loader(job, dp_rank=dp_rank, dp=dp).batches
    samples, size, micro_batch = request.samples, job.batch.global_size, job.layout.micro_batch
    given: list[Split | None] = [split_into(job, one) for one in request.sequences]
    splits = given or [first_split(job)]

    def batches(step: int) -> list[Batch]:
        split = splits[step % len(splits)] if mesh else None
        return proof_batches(
            samples, step, global_size=size, micro_batch=micro_batch, dp_rank=dp_rank, dp=dp, split=split
        )

    return batches


def run_layout(pool: RankPool, request: Request, timeout: float = 300.0) -> Trace:
    """Train under the request's layout on a pool of as many ranks; whole named tensors.

    Raises:
        RankFailure: a rank failed or hung.
        ValueError: replicas differ in a bit, ranks report different losses or norms, or an element is on no rank.
    """
    ranks: list[RankTrace] = pool.run(train_on_rank, request, timeout=timeout)
    for rank, trace in enumerate(ranks):
        if trace.losses != ranks[0].losses or trace.norms != ranks[0].norms:
            raise ValueError(f"rank {rank} reports another loss or gradient norm than rank 0")
    gradients = [
        assemble([rank.gradients[step] for rank in ranks]) for step in range(len(ranks[0].gradients))
    ]
    return Trace(ranks[0].losses, ranks[0].norms, gradients, assemble([rank.parameters for rank in ranks]))
