"""PyTorch's own pipelining: a plain loop around each of its schedules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from bench.contestants import Step
from bench.contestants.torch_loops import adamw, autocast
from bench.plain_llama import PlainLlama, token_loss
from bench.workload import Workload
from meshwright.job.layout import Layout

CLASSES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def build(work: Workload, variant: str) -> Step:
    """``variant`` is the schedule; two stages a rank for those that loop."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = Layout.model_validate({"pp": ranks, "schedule": variant})
    count = layout.stage_count
    layers = layout.stage_layers(work.layers)
    parts = {
        stage: PlainLlama(work, layers[stage], first=stage == 0, last=stage == count - 1)
        for stage in layout.stages_of(rank)
    }
    stages = [PipelineStage(part, stage, count, torch.device("cpu")) for stage, part in parts.items()]
    schedule = _schedule(variant, stages, work.micro_batches)
    optimizer = adamw(work, [p for part in parts.values() for p in part.parameters()])
    has_first, has_last = 0 in parts, count - 1 in parts

    def step(number: int) -> float | None:
        tokens, labels = work.step_data(number)
        losses: list[Tensor] = []
        inputs = (tokens,) if has_first else ()
        targets: dict[str, Any] = {"target": labels, "losses": losses} if has_last else {}
        with autocast(work):
            schedule.step(*inputs, **targets)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if has_last else None

    return step


def _schedule(variant: str, stages: list[PipelineStage], micro_batches: int) -> Any:
    kind: Any = get_schedule_class(CLASSES[variant])
    one_stage = variant in ("gpipe", "1f1b")
    return kind(stages[0] if one_stage else stages, n_microbatches=micro_batches, loss_fn=token_loss)
