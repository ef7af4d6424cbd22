"""A parameter server in one process for proofs: the real stores, models and rules, without sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.order import Order
from meshwright.job.job import Job
from meshwright.prove.layout_run import Box, Request
from meshwright.prove.parity import Trace, assemble, to_numpy
from meshwright.sync.server.rehearsal import Rehearsal
from meshwright.train.placement import placements
from meshwright.train.servers.compute import Computing, join_alone
from meshwright.train.servers.run import Begin, make_mode, make_plan
from meshwright.train.servers.shapes import Shapes
from meshwright.train.servers.store import ShardStore, fresh_store
from meshwright.train.worker import prepare_determinism


class _Watched(ShardStore):
    """A store that keeps the first gradients it is to apply, before they are clipped."""

    gradient_steps = 0

    def watch(self, steps: int) -> _Watched:
        self.gradient_steps = steps
        self.kept: list[list[Box]] = []
        return self

    def update(self, rate: float, factor: float) -> None:
        """See ``Store.update``."""
        if len(self.kept) < self.gradient_steps:
            self.kept.append(self.boxes([piece.gradient for piece in self.owned]))
        super().update(rate, factor)

    def boxes(self, tensors: list[Tensor]) -> list[Box]:
        """Named boxes of tensors that run parallel to the owned ranges."""
        return [
            (place.name, place.shape, place.offsets, to_numpy(place.view(flat)))
            for piece, flat in zip(self.owned, tensors, strict=True)
            for place in placements(piece, self.shapes.segments(piece.name))
        ]


def rehearse(
    request: Request, *, seed: int = 0, before: Callable[[Rehearsal, int], None] | None = None
) -> tuple[Trace, Rehearsal]:
    """Train a request's job, whose strategy is ``server``, in this process; messages in the order ``seed`` draws.

    Args:
        request: the job, its samples, and how many steps and gradients.
        seed: of the order of messages.
        before: called with the number of messages delivered so far before each, to kill somebody.

    Raises:
        RuntimeError: the servers stand still.
        ValueError: replicas of a shard differ in a bit.
    """
    job = request.job.with_steps(request.steps)
    assert request.samples is not None
    samples = request.samples
    with _like_a_rank(job):
        shapes = Shapes(job)
        order = Order(1 << 20, shuffle=False)
        starts = [fresh_store(shapes, shard) for shard in range(job.sync.servers)]
        workers: list[Computing] = []

        def store(shard: int) -> _Watched:
            values = [piece.master.clone() for piece in starts[shard].owned]
            return _Watched(shapes, shard, values).watch(request.gradient_steps)

        def compute() -> Computing:
            workers.append(Computing(job, samples, None, order))  # type: ignore[arg-type]
            return workers[-1]

        rehearsal = Rehearsal(make_plan(job, Begin()), make_mode(job, Begin()), store, compute, seed=seed)
        if before is not None:
            rehearsal.before_delivery = lambda number: before(rehearsal, number)
        notes = rehearsal.run()
        for worker in workers:
            worker.close()
    stores: list[_Watched] = [replica.store for replica in rehearsal.replicas.values()]  # type: ignore[misc]
    # Every replica hands in its boxes: `assemble` refuses two that differ.
    parameters = assemble([each.boxes([piece.master for piece in each.owned]) for each in stores])
    gradients = [assemble([each.kept[step] for each in stores]) for step in range(len(stores[0].kept))]
    losses = [loss for _, loss in notes.losses]
    return Trace(losses, [update.norm for update in notes.updates], gradients, parameters), rehearsal


@contextmanager
def _like_a_rank(job: Job) -> Iterator[None]:
    """One thread, a process group of its own, and the determinism the job asks for; all put back afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    prepare_determinism(job)
    fresh = not dist.is_initialized()
    join_alone()
    try:
        yield
    finally:
        if fresh:
            dist.destroy_process_group()
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
