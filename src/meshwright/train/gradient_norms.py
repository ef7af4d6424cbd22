"""Each rank's own gradient norm, before anything is summed: one that stands out among its replicas is suspect.

Replicas compute the same function of other samples, so their norms are of one size; a fault in one rank's arithmetic or
memory shows as a norm many times that of the others. The suspect step can be computed again: on the same state and
samples it has the same bits, unless the fault was in the computing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from meshwright.comm.collectives import all_gather
from meshwright.comm.copies import Copies, Span
from meshwright.comm.mesh import Mesh
from meshwright.comm.operations import Operations
from meshwright.comm.phase import phase
from meshwright.job.grid import coordinates
from meshwright.job.job import Job
from meshwright.parallel.reducing import Reducer
from meshwright.train.corrupt import CorruptState


@dataclass(frozen=True)
class Outlier:
    """A rank whose gradient norm stands out."""

    step: int
    rank: int
    norm: float
    others: float
    """Median norm of its replicas."""


class WatchedReducer:
    """A reducer that takes the norm of what this rank puts into each sum."""

    def __init__(self, inner: Reducer) -> None:
        self._inner = inner
        self._squares: list[float] = []

    def begin(self) -> None:
        """A new step, or the same one again."""
        self._squares = []

    @property
    def squares(self) -> tuple[float, ...]:
        """Sum of squares of each buffer, in the order in which they were summed."""
        return tuple(self._squares)

    def _see(self, gradient: Tensor) -> None:
        self._squares.append(float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)) ** 2)

    def prepare(self, name: str, size: int, spans: Sequence[Span], copies: Copies) -> None:
        """See ``Reducer.prepare``."""
        self._inner.prepare(name, size, spans, copies)

    def reduce(self, name: str, gradient: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.reduce``."""
        self._see(gradient)
        yield from self._inner.reduce(name, gradient, copies)

    def scatter(self, name: str, output: Tensor, contributions: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.scatter``."""
        self._see(contributions)
        yield from self._inner.scatter(name, output, contributions, copies)

    def across(self, name: str, chunk: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.across``."""
        yield from self._inner.across(name, chunk, copies)

    def state(self) -> dict[str, Tensor]:
        """See ``Reducer.state``."""
        return self._inner.state()


class GradientNorms:
    """Compares the norms of all ranks of a mesh; all call each method together.

    Args:
        watched: what saw this rank's gradients.
        mesh: the ranks.
        factor: how many times the median of the others is too much.
    """

    def __init__(self, watched: WatchedReducer, mesh: Mesh, factor: float) -> None:
        self._watched, self._mesh, self._factor = watched, mesh, factor
        stands = [coordinates(mesh.layout, rank) for rank in range(mesh.layout.ranks)]
        places = [(place.pp, place.tp) for place in stands]
        self._replicas = [
            [other for other, place in enumerate(places) if other != rank and place == mine]
            for rank, mine in enumerate(places)
        ]
        self.found: list[Outlier] = []

    def begin(self) -> None:
        """A step begins, or is computed again."""
        self._watched.begin()

    def outliers(self, step: int) -> list[Outlier]:
        """Ranks whose norms stand out in the step; the same on all ranks."""
        norms = self._gather(math.sqrt(math.fsum(self._watched.squares)))
        found = [
            Outlier(step, rank, norms[rank], median(norms[other] for other in others))
            for rank, others in enumerate(self._replicas)
            if others and _stands_out(norms[rank], [norms[other] for other in others], self._factor)
        ]
        self.found += found
        return found

    def squares(self) -> tuple[float, ...]:
        """Of this rank's buffers."""
        return self._watched.squares

    def compare(self, before: tuple[float, ...], step: int, good_step: int) -> None:
        """After a step was computed again.

        Raises:
            CorruptState: on all ranks, when some rank computed something else this time.
        """
        other = self._gather(float(self._watched.squares != before))
        wrong = [rank for rank, changed in enumerate(other) if changed]
        if wrong:
            names = ", ".join(map(str, wrong))
            raise CorruptState(
                f"in step {step} rank {names} came to other gradients the second time, from the same state and samples",
                wrong,
                good_step,
            )

    def _gather(self, value: float) -> list[float]:
        mine = torch.tensor([value], dtype=torch.float64, device=self._mesh.device)
        all_ = mine.new_empty(self._mesh.degree("world"))
        with phase("metrics"):
            all_gather(all_, mine, self._mesh.group("world"))
        return [float(each) for each in all_.tolist()]


def watches_norms(job: Job) -> bool:
    """Whether the job asks for it, and sums gradients in a way that shows each rank's own."""
    plain = job.sync.strategy == "all-reduce" and job.sync.compression == "none" and not job.train.deterministic
    return job.recovery.outlier is not None and job.layout.dp > 1 and plain


def _stands_out(norm: float, others: list[float], factor: float) -> bool:
    usual = median(others)
    if not math.isfinite(norm):
        return math.isfinite(usual)
    return norm > factor * usual
