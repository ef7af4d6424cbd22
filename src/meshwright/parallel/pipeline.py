"""Pipeline parallelism: the layers are cut into stages, micro-batches flow through them.

    rank 0   F0 F1 F2 .. .. .. B0 F3 B1 .. B2 .. B3        1F1B, pp=4, 4 micro-batches:
    rank 1      F0 F1 .. .. B0 F2 B1 ..                    each rank starts as late as its
    rank 2         F0 .. B0 F1 ..                          depth and never holds more than
    rank 3            F0 B0 F1 B1                          pp - rank activations

Bubble of GPipe (Huang et al. 2019) and 1F1B (Narayanan et al. 2019): (pp-1)(F+B). Interleaved 1F1B
(Narayanan et al. 2021) and looped breadth-first (Lamy-Poirier 2023) divide it by the stages a rank.
Zero bubble and ZBV (Qi et al. 2023) and DualPipeV (DeepSeek 2024) part the backward pass into input and
weight gradients and fill the bubble with the latter. Schedules come from
``torch.distributed.pipelining``; GPipe, 1F1B and looped BFS are lists of actions for its runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _ComputationType,
)

from meshwright.comm.mesh import Mesh
from meshwright.comm.phase import phase
from meshwright.comm.timeline import blocked
from meshwright.errors import InputError
from meshwright.job.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from meshwright.job.model_spec import ModelSpec
from meshwright.job.schedule_rules import micro_batch_rule
from meshwright.model.micro_batch import MicroBatch
from meshwright.parallel.owned import DataParallel
from meshwright.parallel.pipeline_stage import Stage, StageProgram


class BreadthFirst(ScheduleLoopedBFS):
    """All micro-batches through one stage, then all through the rank's next. With one stage a rank: GPipe.

    Backward runs in micro-batch order (torch's own runs the last one first), so that gradients are added
    in the same order in every schedule.
    """

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        stages = range(rank, self.pp_group_size * len(self._stages), self.pp_group_size)
        return [
            _Action(stage, kind, micro_batch)
            for kind, order in ((_ComputationType.FORWARD, stages), (_ComputationType.FULL_BACKWARD, stages[::-1]))
            for stage in order
            for micro_batch in range(self._n_microbatches)
        ]


class OneForwardOneBackward(ScheduleLoopedBFS):
    """1F1B, one stage a rank: ``pp - 1 - rank`` forwards, then forward and backward in turn, then the rest."""

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        total = self._n_microbatches
        ahead = min(total, self.pp_group_size - 1 - rank)
        actions: list[_Action | None] = [_Action(rank, _ComputationType.FORWARD, index) for index in range(ahead)]
        for index in range(total):
            if ahead + index < total:
                actions.append(_Action(rank, _ComputationType.FORWARD, ahead + index))
            actions.append(_Action(rank, _ComputationType.FULL_BACKWARD, index))
        return actions


SCHEDULE_CLASSES: Mapping[str, type[PipelineScheduleMulti]] = {
    "gpipe": BreadthFirst,
    "1f1b": OneForwardOneBackward,
    "interleaved": ScheduleInterleaved1F1B,
    "looped-bfs": BreadthFirst,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class PipelineExecutor:
    """Runs a step's micro-batches through the stages of this rank, together with the other pipeline ranks.

    Args:
        stages: this rank's stage modules by stage number (``layout.stages_of``).
        data_parallel: is told of every backward pass; gradients are its affair.
        mesh: ranks and groups; messages travel in ``mesh.group("pp")``, whatever the placement.
        layout: schedule, pipeline ranks, virtual stages, recompute policy.
        spec: for the width of the activations between stages.
        dtype: their type.
        device: where this rank computes.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        data_parallel: DataParallel,
        mesh: Mesh,
        layout: Layout,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layout, self._data_parallel, self._device = layout, data_parallel, device
        self._group = mesh.group("pp")
        self._hidden, self._dtype, self._tp = spec.hidden, dtype, layout.tp
        self._head_norms = spec.qk_norm
        self._count = layout.stage_count
        self._programs = {
            index: StageProgram(module, last=index == self._count - 1) for index, module in sorted(stages.items())
        }
        self._rank_of_stage = {stage: rank for rank in range(layout.pp) for stage in layout.stages_of(rank)}
        self._prepared: dict[tuple[int, int], tuple[PipelineScheduleMulti, list[Stage]]] = {}
        if device.type == "cuda":
            # NCCL makes a communicator at its first call, in which all ranks of the group must take part.
            dist.barrier(group=self._group)

    def run(self, batches: Sequence[MicroBatch], divisor: float) -> list[Tensor | None]:
        """Accumulate the gradients of ``sum over valid tokens / divisor``.

        Args:
            batches: the step's micro-batches, the same on every pipeline rank, all of one shape.
            divisor: valid tokens of the global batch.

        Returns:
            The loss of each micro-batch on the rank of the last stage, None elsewhere.

        Raises:
            InputError: the schedule cannot run that number of micro-batches.
        """
        schedule, stages = self.prepare(batches)
        for stage in stages:
            stage.begin_step()
        losses: list[Tensor] = []
        schedule._step_microbatches(
            [()] * len(batches),
            [{"batch": batch, "divisor": divisor} for batch in batches],
            [None] * len(batches),
            losses,
            return_outputs=False,
        )
        for stage in stages:
            stage.end_step()
        if not losses:
            return [None] * len(batches)
        return [loss.detach() for loss in losses]

    def _tokens(self, batches: Sequence[MicroBatch]) -> int:
        """Tokens of a micro-batch on one tensor-parallel rank."""
        shapes = {tuple(batch.tokens.shape) for batch in batches}
        if len(shapes) != 1:
            raise InputError(f"micro-batches: a pipeline step runs micro-batches of one shape, got {sorted(shapes)}")
        return batches[0].tokens.numel() // self._tp

    def prepare(self, batches: Sequence[MicroBatch]) -> tuple[PipelineScheduleMulti, list[Stage]]:
        """Make the schedule for such micro-batches, unless it is the last one that was made; ``run`` does it itself.

        Raises:
            InputError: the schedule cannot run that number of micro-batches.
        """
        key = (len(batches), self._tokens(batches))
        if key not in self._prepared:
            self._refuse(len(batches))
            self._prepared = {key: self._build(*key)}
        return self._prepared[key]

    def _build(self, micro_batches: int, tokens: int) -> tuple[PipelineScheduleMulti, list[Stage]]:
        stages: list[Any] = self._make_stages(micro_batches, tokens)
        schedule = SCHEDULE_CLASSES[self._layout.schedule](stages, micro_batches, _the_output, scale_grads=False)
        schedule._stages_forward_initialized = schedule._stages_backward_initialized = True
        return schedule, stages

    def make_stages(self, batches: Sequence[MicroBatch]) -> list[Stage]:
        """This rank's stages on torch's runtime, for steps of such micro-batches.

        Raises:
            InputError: the schedule cannot run that number of micro-batches.
        """
        self._refuse(len(batches))
        return self._make_stages(len(batches), self._tokens(batches))

    def _refuse(self, micro_batches: int) -> None:
        layout = self._layout
        wrong = micro_batch_rule(layout.schedule, layout.pp, layout.virtual_stages, micro_batches)
        if wrong:
            raise InputError(wrong)

    def _make_stages(self, micro_batches: int, tokens: int) -> list[Stage]:
        layout = self._layout
        hidden = torch.empty(tokens, self._hidden, dtype=self._dtype, device="meta", requires_grad=True)
        splits = layout.schedule in SPLIT_BACKWARD_SCHEDULES
        return [
            Stage(
                program, index, self._count, self._group, hidden, micro_batches, self._device, self._data_parallel,
                split=splits and not self._recomputes_parameters(index),
            )
            for index, program in self._programs.items()
        ]  # fmt: skip

    def _recomputes_parameters(self, stage: int) -> bool:
        """Whether backward recomputes something that holds parameters, which each part would have to do anew."""
        policy = self._layout.stage_recompute(stage)
        return policy == "full" or (policy == "selective" and self._head_norms)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch], divisor: float) -> list[Tensor | None]:
        """The losses alone, for any number of micro-batches; gradients and schedules stay as they are.

        All stages work in step: at tick t stage s has micro-batch t - s, then every rank exchanges what crosses
        ranks in one batch, in stage order on both sides.
        """
        losses: list[Tensor | None] = [None] * len(batches)
        inputs: dict[int, Tensor] = {}
        tokens = self._tokens(batches) if batches else 0
        with self._evaluating(), phase("evaluate"):
            for tick in range(len(batches) + self._count - 1):
                operations: list[dist.P2POp] = []
                arriving: dict[int, Tensor] = {}
                for stage, program in self._programs.items():
                    index = tick - stage
                    if 0 <= index < len(batches):
                        output = program(inputs.pop(stage, None), batch=batches[index], divisor=divisor)
                        if stage == self._count - 1:
                            losses[index] = output
                        elif stage + 1 in self._programs:
                            arriving[stage + 1] = output
                        else:
                            operations.append(self._transfer(dist.isend, output.contiguous(), stage + 1))
                for stage in self._programs:
                    if stage > 0 and stage - 1 not in self._programs and 0 <= tick + 1 - stage < len(batches):
                        arriving[stage] = torch.empty(tokens, self._hidden, dtype=self._dtype, device=self._device)
                        operations.append(self._transfer(dist.irecv, arriving[stage], stage - 1))
                inputs = arriving
                self._exchange(operations)
        return losses

    def _transfer(self, operation: Any, tensor: Tensor, other_stage: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self._group, group_peer=self._rank_of_stage[other_stage])

    def _exchange(self, operations: list[dist.P2POp]) -> None:
        if operations:
            works = dist.batch_isend_irecv(operations)
            with blocked(self._group, "exchange"):
                for work in works:
                    work.wait()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        before = {program: program.module.training for program in self._programs.values()}
        try:
            for program in before:
                program.module.eval()
            yield
        finally:
            for program, training in before.items():
                program.module.train(training)
                for module in program.modules():
                    if isinstance(module, FSDPModule):
                        # Whole parameters left from here would hide the next update.
                        module.reshard()


def _the_output(output: Tensor, _target: None) -> Tensor:
    """The last stage's program returns its loss."""
    return output
