"""The training step where steps overlap in the pipeline (PipeDream-2BW): every gradient is one update late.

    step t            gradient at W_{t-1}, in the version that step t-2 used; W_{-1} = W_0
    its update        W_{t+1} = W_t - update(gradient): W_t is copied over W_{t-1}, which nothing reads any more, and
                      updated there; the optimizer's moments are one for both versions

``advance`` begins step t while the backwards of step t-1 drain. When a rank's gradients of step t-1 are complete it
says its loss and squares, and computes on; when all its forwards of step t have run it hears the sum, clips, and
updates. In between lie at least ``m - pp + 1`` micro-batches, in which the message travels: clipping by the global norm
stops nobody.

Every step in flight is ended by ``drain``. What comes then is the same to the bit, so validation and checkpoints may
lie anywhere. In deterministic mode the norm takes two rounds, of which the second waits for all ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.collectives import Handle, all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.comm.phase import phase
from meshwright.comm.position import holds_state
from meshwright.data.batch import Batch
from meshwright.job.job import Job
from meshwright.model.dropout import Randomness
from meshwright.parallel.continuous import ContinuousPipeline, InFlight
from meshwright.parallel.owned import Owned
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.train.build import Built, build
from meshwright.train.norm import clip_coefficient, local_square_sum
from meshwright.train.optimizer import SGD, AdamW
from meshwright.train.trainer import Said, StepReport, Trainer, optimizer_of


def make_trainer(
    job: Job, mesh: Mesh, device: torch.device | None = None, *, abstract: bool = False
) -> Trainer:
    """The trainer that the job's schedule takes; arguments as for ``Trainer``."""
    kind = DelayedTrainer if job.layout.delayed else Trainer
    return kind(job, mesh, device, abstract=abstract)


@dataclass
class _Version:
    """Parameters, gradients and what runs on them."""

    built: Built
    owned: list[Owned]
    optimizer: AdamW | SGD
    """Its moments are those of the other version."""

    @property
    def pipeline(self) -> PipelineExecutor:
        """Its stages."""
        assert self.built.pipeline is not None  # a job without a pipeline is refused
        return self.built.pipeline

    def begin(self, randomness: Randomness) -> None:
        """A step will run on it."""
        self.built.data_parallel.begin_step()
        for module in self.built.stages.values():
            module.randomness = randomness


@dataclass
class _Ended:
    """A step whose gradients are complete on this rank, on its way to a decision."""

    version: _Version
    slots: Tensor
    """Losses, see ``Said``."""
    said: Said | None
    peak: Tensor | None
    """In deterministic mode: what has to be known of all ranks before anything can be said."""
    travelling: Handle | None


class DelayedTrainer(Trainer):
    """See the module. ``stages``, ``owned``, ``optimizer`` and so on are those of the newest version."""

    def __init__(self, job: Job, mesh: Mesh, device: torch.device | None = None, *, abstract: bool = False) -> None:
        super().__init__(job, mesh, device, abstract=abstract)
        other = build(job, mesh, self.device, abstract=abstract)
        owned = other.data_parallel.owned()
        second = _Version(other, owned, optimizer_of(job, owned, self.optimizer.state()))
        self._both = (_Version(self.versions[0], self.owned, self.optimizer), second)
        self.versions.append(other)
        pipelines = [version.pipeline for version in self._both]
        self.pipeline = ContinuousPipeline(pipelines, job.layout.pp, mesh.coordinate("pp"), self._gradients_complete)
        self._turn = 0
        """Which version the next step uses."""
        self._valid: deque[int] = deque()
        """Valid tokens of each step under way."""
        self._ended: deque[_Ended] = deque()
        self._reports: list[StepReport] = []
        self._abandoned = False
        self._show(second)

    @property
    def next_step(self) -> int:
        """See ``Trainer.next_step``."""
        return self.step_number + len(self._valid)

    @property
    def previous(self) -> list[Tensor]:
        """See ``Trainer.previous``."""
        older = self._both[0] if self.owned is self._both[1].owned else self._both[1]
        return [piece.master for piece in older.owned]

    def publish(self) -> None:
        """See ``Trainer.publish``."""
        for version in self._both:
            version.built.data_parallel.publish()

    def step(self, batches: list[Batch]) -> StepReport:
        """One step and nothing under way behind it."""
        return self.advance(batches, drain=True)[-1]

    def advance(self, batches: list[Batch], *, drain: bool) -> list[StepReport]:
        """See ``Trainer.advance``."""
        step, version = self.next_step, self._both[self._turn]
        holds_state(-1)
        valid = self.count_valid(batches)
        version.begin(Randomness(self.job.train.seed, step))
        self._valid.append(valid)
        self.pipeline.feed(self._turn, batches, max(valid, 1))
        self._turn = 1 - self._turn
        while self.step_number < step and self._ended:
            self._decide()
        return self._taken() + (self.drain() if drain else [])

    def drain(self) -> list[StepReport]:
        """See ``Trainer.drain``."""
        self.pipeline.drain()
        while self._ended:
            self._decide()
        holds_state(self.step_number)
        return self._taken()

    def abandon(self) -> None:
        """See ``Trainer.abandon``."""
        self._abandoned = True
        self.drain()

    def _taken(self) -> list[StepReport]:
        reports, self._reports = self._reports, []
        return reports

    def _show(self, version: _Version) -> None:
        """From now on this is the newest."""
        older = self.optimizer
        self.stages, self.data_parallel = version.built.stages, version.built.data_parallel
        self.owned, self.optimizer, self.executor = version.owned, version.optimizer, version.pipeline
        version.optimizer.steps = older.steps
        if isinstance(version.optimizer, AdamW) and isinstance(older, AdamW):
            version.optimizer.variance_steps = older.variance_steps

    # -- the end of a step ----------------------------------------------------------------------------

    def _gradients_complete(self, step: InFlight) -> None:
        """The last backward of a step has run on this rank: say what all must know of it, and go on."""
        while self._ended:
            self._decide()
        version = self._both[step.version]
        with phase("reduce"):
            version.built.data_parallel.finish_gradients()
            for action in self.after_reduction:
                action(version.owned)
        said = peak = None
        slots = self._loss_slots(step.losses)
        with phase("metrics"):
            if self.job.train.deterministic:
                peak = self._peak(version.owned)
                travelling = all_reduce(peak, self.mesh.group("world"), op="max", asynchronous=True)
            else:
                said = Said(self._stop_wish(), (local_square_sum(version.owned),), slots)
                travelling = all_reduce(said.vector, self.mesh.group("world"), asynchronous=True)
        self._ended.append(_Ended(version, slots, said, peak, travelling))

    def _hear(self, ended: _Ended) -> Said:
        """What all ranks together say of a step."""
        if ended.travelling is not None:
            ended.travelling.wait()
        if ended.said is not None:
            return ended.said
        assert ended.peak is not None
        said = Said(self._stop_wish(), self._squares_below(ended.peak, ended.version.owned), ended.slots)
        with phase("metrics"):
            all_reduce(said.vector, self.mesh.group("world"))
        return said

    def _decide(self) -> None:
        """Hear what all ranks said of the oldest step that ended, and apply its update or not."""
        ended, valid = self._ended.popleft(), self._valid.popleft()
        said = self._hear(ended)
        if self._abandoned:
            return
        loss, norm, stop = said.heard()
        finite = math.isfinite(norm) and math.isfinite(loss)
        rate = self.learning_rate(self.step_number)
        if finite or self.job.train.nonfinite == "skip":
            self._replace(ended.version)
            if finite:
                self._update(rate, clip_coefficient(norm, self._limit))
            with phase("publish"):
                self.data_parallel.publish()
        else:
            self._abandoned = True
        self.step_number += 1
        self.last_report = StepReport(self.step_number, loss, norm, rate, finite, valid, 1.0, stop)
        self._reports.append(self.last_report)

    def _replace(self, version: _Version) -> None:
        """The newest parameters take the place of the oldest, and are the newest there."""
        with phase("optimizer"), torch.no_grad():
            _copy([piece.master for piece in version.owned], [piece.master for piece in self.owned])
        self._show(version)


def _copy(there: Sequence[Tensor], here: Sequence[Tensor]) -> None:
    if there:
        torch._foreach_copy_(list(there), list(here))
