"""PyTorch's own tensor parallel: DTensor plans and loss parallel, as in its tutorial."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench.contestants import Step
from bench.contestants.torch_loops import adamw, autocast
from bench.plain_llama import PlainLlama, token_loss
from bench.workload import Workload


def build(work: Workload, variant: str) -> Step:
    """``replicated``: activations outside the parallel regions are whole; ``sequence``: split over the sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = PlainLlama(work)
    parallelize_module(model, mesh, plan(work, sequence=variant == "sequence"))
    # foreach refuses DTensors and plain tensors in one group
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = adamw(work, [{"params": group} for group in (split, whole) if group])

    def step(number: int) -> float:
        tokens, labels = work.step_data(number)
        with autocast(work):
            logits = model(tokens)
        with loss_parallel():
            loss = token_loss(logits, labels)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss.detach())

    return step


def plan(work: Workload, *, sequence: bool) -> dict[str, ParallelStyle]:
    """Columns for q, k, v, gate, up and head, rows for output and down, the vocabulary split."""
    hidden: Any = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "head": ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False),
    }
    for layer in range(work.layers):
        prefix = f"layers.{layer}."
        styles |= {prefix + f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        styles |= {prefix + f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        styles |= {
            prefix + "attention.output": RowwiseParallel(output_layouts=hidden),
            prefix + "mlp.down": RowwiseParallel(output_layouts=hidden),
        }
        if sequence:
            styles |= {
                prefix + "attention_norm": SequenceParallel(),
                prefix + "mlp_norm": SequenceParallel(),
                prefix + "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                prefix + "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
    if sequence:
        styles["final_norm"] = SequenceParallel()
    return styles
