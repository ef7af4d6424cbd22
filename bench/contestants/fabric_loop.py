"""Lightning Fabric: its DDP strategy."""

from __future__ import annotations

import contextlib
import os

import torch.distributed as dist

from bench.contestants import Step
from bench.contestants.torch_loops import adamw, train_step
from bench.plain_llama import PlainLlama
from bench.workload import Workload


def build(work: Workload, variant: str) -> Step:
    """``ddp``; mixed precision by Fabric's own autocast."""
    # Tells Fabric that the ranks are started already, as torchrun would.
    os.environ.update(TORCHELASTIC_RUN_ID="bench", GROUP_RANK="0")
    from lightning_fabric import Fabric

    ranks = dist.get_world_size()
    precision = "bf16-mixed" if work.dtype == "bfloat16" else "32-true"
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=variant, precision=precision)
    fabric.launch()
    assert fabric.world_size == ranks
    module = PlainLlama(work)
    model, optimizer = fabric.setup(module, adamw(work, module.parameters()))

    def step(number: int) -> float:
        tokens, labels = work.share(number, dist.get_rank(), ranks)
        return train_step(model, optimizer, tokens, labels, contextlib.nullcontext, fabric.backward)

    return step
