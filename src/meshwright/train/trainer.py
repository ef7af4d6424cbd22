"""One training step on one rank: forward, backward, reduction, one agreed decision, update."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.comm.position import holds_state
from meshwright.comm.record import phase
from meshwright.data.batch import Batch
from meshwright.job.job import Job
from meshwright.job.validate_less_often import apart
from meshwright.model.dropout import Randomness
from meshwright.parallel.owned import Owned
from meshwright.train.apart import Apart
from meshwright.train.build import Built, build
from meshwright.train.compressing import make_compressing, optimizer_momentum
from meshwright.train.executor import Executor, LoopExecutor
from meshwright.train.gradient_norms import GradientNorms
from meshwright.train.learning_rate import learning_rate
from meshwright.train.loss_scale import SMALLEST_SCALE, LossScale
from meshwright.train.norm import OrderFreeSquares, clip_coefficient, local_peak, local_square_sum
from meshwright.train.optimizer import SGD, AdamW, State, make_optimizer


@dataclass(frozen=True)
class StepReport:
    """What every rank knows of a finished step; the numbers are the same on all ranks.

    ``loss`` is in nats per valid token of the global batch; ``gradient_norm`` is before clipping.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    applied: bool
    valid_tokens: int
    loss_scale: float
    stop_requested: bool


class Trainer:
    """The distributed model of one job on this rank, and the step that trains it.

    Args:
        job: a resolved job; its layout must be the mesh's.
        mesh: the ranks and groups.
        device: where this rank computes.
        abstract: build on the current fake-tensor mode instead of filling real parameters.
    """

    def __init__(self, job: Job, mesh: Mesh, device: torch.device | None = None, *, abstract: bool = False) -> None:
        self.job, self.mesh = job, mesh
        self.device = device or torch.device("cpu")
        built: Built = build(job, mesh, self.device, abstract=abstract)
        self.versions = [built]
        """The model, as often as this rank holds it."""
        self.stages, self.data_parallel = built.stages, built.data_parallel
        self.owned = self.data_parallel.owned()
        self.after_reduction = built.after_reduction
        factor = job.recovery.outlier
        self.norms = GradientNorms(built.watched, mesh, factor) if built.watched is not None and factor else None
        self.optimizer = optimizer_of(job, self.owned)
        self.apart = Apart(job, mesh, self.owned, self.optimizer, self.data_parallel) if apart(job) else None
        self.compressing = make_compressing(job, self.data_parallel, self.optimizer)
        self.executor: Executor = built.pipeline or LoopExecutor(next(iter(self.stages.values())), self.data_parallel)
        precision = job.precision
        half = precision.dtype == "float16"
        self.loss_scale = LossScale(
            value=precision.loss_scale_initial if half else 1.0,
            growth_interval=precision.loss_scale_growth_interval,
            enabled=half,
        )
        self.step_number = 0
        self.last_report: StepReport | None = None
        """Of the step after which masters and optimizer are the state."""
        self.stop_wanted = False
        self._valid_of_replica = 0
        self._limit = job.optimizer.clip_norm
        self.changing = threading.Lock()
        """Held while masters, optimizer, loss scale and step number go from one step to the next."""
        self._counts_loss = mesh.coordinate("tp") == 0

    @property
    def next_step(self) -> int:
        """The step (from 0) that ``advance`` begins."""
        return self.step_number

    def advance(self, batches: list[Batch], *, drain: bool) -> list[StepReport]:
        """Begin the next step; the steps that ended meanwhile, oldest first.

        Args:
            batches: as for ``step``.
            drain: end it too. Only where the schedule lets steps overlap need it be still under way otherwise.
        """
        return [self.step(batches)]

    def drain(self) -> list[StepReport]:
        """End every step that is under way: parameters and optimizer are then the state after a step."""
        return []

    def abandon(self) -> None:
        """End every step that is under way without an update."""

    def publish(self) -> None:
        """Make masters that were changed from outside the parameters that forward passes use."""
        self.data_parallel.publish()

    @property
    def previous(self) -> list[Tensor] | None:
        """Where gradients are one update late: the masters before the last update, by owned range."""
        return None

    def step(self, batches: list[Batch]) -> StepReport:
        """Train on this rank's micro-batches of the next global batch.

        Every rank of the mesh must call it with the same number of micro-batches.
        """
        valid = self.count_valid(batches)
        mine = self._valid_of_replica if self.apart is not None else valid
        divisor = max(mine, 1) / self.loss_scale.value
        losses = self._gradients(batches, divisor)
        if self.norms is not None and self.norms.outliers(self.step_number + 1) and self.job.recovery.replay:
            before = self.norms.squares()
            losses = self._gradients(batches, divisor)
            self.norms.compare(before, self.step_number + 1, self.step_number)
        with phase("reduce"):
            for action in self.after_reduction:
                action(self.owned)
            if self.apart is not None and self.apart.synchronous(self.step_number):
                self.apart.sum_gradients(mine / max(valid, 1))
        loss, norm, own_norm, stop = self._agree(losses, mine / max(valid, 1))
        scale = self.loss_scale.value
        loss, norm, own_norm = loss / scale, norm / scale, own_norm / scale
        finite = math.isfinite(norm) and math.isfinite(loss)
        rate = self.learning_rate(self.step_number)
        with self.changing:
            holds_state(-1)
            if finite:
                limit = None if self.compressing is not None and self.compressing.clips_locally else self._limit
                self._update(rate, clip_coefficient(own_norm, limit) / scale)
            if self.compressing is not None:
                self.compressing.settle(finite)
            self.loss_scale.update(finite=finite)
            self.step_number += 1
            report = StepReport(self.step_number, loss, norm, rate, finite, valid, scale, stop)
            self.last_report = report
            holds_state(self.step_number)
        if self.apart is not None and not self.must_stop(report):
            self.apart.after(self.step_number, mine if finite else 0)
        if finite or self.apart is not None:
            with phase("publish"):
                self.data_parallel.publish()
        return report

    def must_stop(self, report: StepReport) -> bool:
        """Whether a step that was not applied ends the run; a loss scale that is still falling does not."""
        scale = self.loss_scale
        overflow = scale.enabled and math.isfinite(report.loss) and report.loss_scale > SMALLEST_SCALE
        return not report.applied and self.job.train.nonfinite == "stop" and not overflow

    def _gradients(self, batches: list[Batch], divisor: float) -> list[Tensor | None]:
        """Forward and backward, and the sums over the dp ranks; the losses where they are known."""
        self.data_parallel.begin_step()
        if self.norms is not None:
            self.norms.begin()
        if self.compressing is not None:
            self.compressing.begin(self.step_number)
        self._set_randomness()
        losses = self.executor.run(batches, divisor)
        with phase("reduce"):
            self.data_parallel.finish_gradients()
        return losses

    def evaluate(self, batches: list[Batch]) -> tuple[float, int, bool]:
        """Sum of the loss (nats) and valid tokens over the micro-batches of all dp ranks; whether any wants to stop."""
        losses = self.executor.evaluate(batches, 1.0)
        wish = torch.tensor([float(self.stop_wanted)], dtype=torch.float64, device=self.device)
        vector = torch.cat([wish, self._loss_slots(losses)])
        with phase("metrics"):
            all_reduce(vector, self.mesh.group("world"))
        return _ordered_sum(vector[1:]), self.count_valid(batches), bool(vector[0] > 0)

    def sync_memory(self) -> list[Tensor]:
        """What compression and replicas that train apart keep from step to step."""
        memories = [] if self.compressing is None else [*self.compressing.reducer.memories]
        held = [tensor for memory in memories for tensor in (memory.kept, memory.spare)]
        return held if self.apart is None else [*held, *self.apart.memory()]

    def shared_model(self) -> AbstractContextManager[None]:
        """Inside, parameters are what is validated: those that all replicas stand for, where they train apart."""
        return nullcontext() if self.apart is None else self.apart.shared_model()

    def count_valid(self, batches: list[Batch]) -> int:
        """Valid target tokens of the global batch: the one denominator of the step."""
        replicas, replica = (1, 0) if self.apart is None else (self.apart.replicas, self.apart.replica)
        count = torch.zeros(replicas, dtype=torch.int64, device=self.device)
        count[replica] = sum(batch.valid_tokens for batch in batches)
        if self.mesh.degree("dp") > 1:
            with phase("batch"):
                all_reduce(count, self.mesh.group("dp"))
        self._valid_of_replica = int(count[replica].item())
        return int(count.sum().item())

    def learning_rate(self, step: int) -> float:
        """The rate that step ``step`` (from 0) uses."""
        optimizer = self.job.optimizer
        return learning_rate(
            step,
            peak=optimizer.lr,
            schedule=optimizer.schedule,
            total_steps=self.job.train.steps,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=optimizer.decay_steps,
            min_ratio=optimizer.min_lr_ratio,
        )

    def _set_randomness(self) -> None:
        randomness = Randomness(self.job.train.seed, self.step_number)
        for module in self.stages.values():
            module.randomness = randomness

    def _update(self, rate: float, factor: float) -> None:
        with phase("optimizer"):
            if factor != 1.0:
                gradients = [piece.gradient for piece in self.owned if piece.gradient.numel()]
                torch._foreach_mul_(gradients, factor)
            self.optimizer.step(rate)

    def _loss_slots(self, losses: list[Tensor | None]) -> Tensor:
        """The loss of every micro-batch of the global batch, at its own place; zero where it is another rank's."""
        dp, rank = self.mesh.degree("dp"), self.mesh.coordinate("dp")
        slots = torch.zeros(dp * len(losses), dtype=torch.float64, device=self.device)
        if self._counts_loss:
            for index, loss in enumerate(losses):
                if loss is not None:
                    slots[index * dp + rank] = loss.double()
        return slots

    def _agree(self, losses: list[Tensor | None], share: float) -> tuple[float, float, float, bool]:
        """Loss, gradient norm (both still scaled) and the wish to stop, agreed by all ranks in one exchange.

        Where replicas train apart (``share``: of all valid tokens, in this one), the norm is the root of the mean of
        their squares by tokens; the third number is this replica's own.
        """
        slots = self._loss_slots(losses)
        if self.apart is not None:
            return self._agree_apart(slots.mul_(share), share, self.apart)
        if self.job.train.deterministic:
            squares: tuple[float, ...] = self._order_free_squares()
        else:
            squares = (local_square_sum(self.owned),)
        said = Said(self._stop_wish(), squares, slots)
        with phase("metrics"):
            if self.mesh.degree("world") > 1:
                all_reduce(said.vector, self.mesh.group("world"))
        loss, norm, stop = said.heard()
        return loss, norm, norm, stop

    def _stop_wish(self) -> Tensor:
        return torch.tensor([float(self.stop_wanted)], dtype=torch.float64, device=self.device)

    def _agree_apart(self, slots: Tensor, share: float, apart: Apart) -> tuple[float, float, float, bool]:
        squares = torch.zeros(apart.replicas, dtype=torch.float64, device=self.device)
        squares[apart.replica] = local_square_sum(self.owned) * share
        head = torch.tensor([float(self.stop_wanted)], dtype=torch.float64, device=self.device)
        vector = torch.cat([head, squares, slots])
        with phase("metrics"):
            all_reduce(vector, self.mesh.group("world"))
        weighted = vector[1 : 1 + apart.replicas]
        total, own = float(weighted.sum()), float(weighted[apart.replica])
        norm = math.sqrt(total) if total >= 0 else math.nan
        if apart.synchronous(self.step_number):  # equal gradients are clipped alike: one number for all replicas
            own_norm = norm
        else:
            own_norm = math.sqrt(own / share) if share > 0 and own >= 0 else 0.0
        return _ordered_sum(vector[1 + apart.replicas :]), norm, own_norm, bool(vector[0] > 0)

    def _order_free_squares(self) -> tuple[float, float]:
        peak = self._peak(self.owned)
        with phase("metrics"):
            if self.mesh.degree("world") > 1:
                all_reduce(peak, self.mesh.group("world"), op="max")
        return self._squares_below(peak, self.owned)

    def _peak(self, owned: list[Owned]) -> Tensor:
        """``[1]``: the largest gradient element of this rank."""
        peak = torch.tensor([local_peak(owned)], dtype=torch.float64, device=self.device)
        # A maximum drops NaN on some backends; infinity survives all of them.
        return torch.nan_to_num(peak, nan=math.inf, posinf=math.inf)

    def _squares_below(self, peak: Tensor, owned: list[Owned]) -> tuple[float, float]:
        """This rank's sum of squares in two parts that add up alike in any order; ``peak``: of all ranks."""
        return OrderFreeSquares(float(peak.item()), self.job.model_spec.parameter_count).local(owned)


class Said:
    """What a rank says of a step, and once it is summed over the ranks, what all of them know.

    Args:
        wish: ``[1]``, above 0: to stop.
        squares: parts of the sum of squares of the gradients this rank counts.
        slots: the loss of each micro-batch of the global batch, at its own place.
    """

    def __init__(self, wish: Tensor, squares: tuple[float, ...], slots: Tensor) -> None:
        self._head = 1 + len(squares)
        self.vector = torch.cat([wish, wish.new_tensor(squares), slots])

    def heard(self) -> tuple[float, float, bool]:
        """Loss, gradient norm, and whether any rank wants to stop; of the summed vector."""
        total = float(self.vector[1 : self._head].sum())
        norm = math.sqrt(total) if total >= 0 else math.nan
        return _ordered_sum(self.vector[self._head :]), norm, bool(self.vector[0] > 0)


def optimizer_of(job: Job, owned: Sequence[Owned], shared: State | None = None) -> AdamW | SGD:
    """The optimizer of a job over these ranges; ``shared``: see ``make_optimizer``."""
    optimizer = job.optimizer
    return make_optimizer(
        owned,
        name=optimizer.name,
        betas=optimizer.betas,
        eps=optimizer.eps,
        momentum=optimizer_momentum(job),
        weight_decay=optimizer.weight_decay,
        shared=shared,
    )


def _ordered_sum(slots: Tensor) -> float:
    """Sum in micro-batch order, so the printed loss does not depend on the layout either."""
    return float(sum(slots.tolist()))
