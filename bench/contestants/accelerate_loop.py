"""Hugging Face Accelerate: DistributedDataParallel on CPU (its FSDP plugin is not applied there)."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from bench.contestants import Step
from bench.contestants.torch_loops import adamw, train_step
from bench.plain_llama import PlainLlama
from bench.workload import Workload


def build(work: Workload, variant: str) -> Step:
    """``ddp``; mixed precision by Accelerate's own autocast."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if work.dtype == "bfloat16" else "no")
    assert accelerator.num_processes == dist.get_world_size()
    module = PlainLlama(work)
    model, optimizer = accelerator.prepare(module, adamw(work, module.parameters()))

    def step(number: int) -> float:
        tokens, labels = work.share(number, dist.get_rank(), dist.get_world_size())
        return train_step(model, optimizer, tokens, labels, contextlib.nullcontext, accelerator.backward)

    return step
