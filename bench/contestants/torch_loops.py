"""Plain PyTorch: one device, DistributedDataParallel, FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.contestants import Step
from bench.plain_llama import PlainLlama, token_loss
from bench.workload import Workload


def autocast(work: Workload) -> contextlib.AbstractContextManager[Any]:
    """What a plain loop runs its forward pass under."""
    if work.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def adamw(work: Workload, parameters: Any) -> torch.optim.AdamW:
    """The optimizer of every peer."""
    return torch.optim.AdamW(parameters, lr=work.lr, betas=(0.9, 0.95), weight_decay=work.weight_decay, foreach=True)


def build(work: Workload, variant: str) -> Step:
    """``single``, ``ddp`` or ``fsdp2`` (ZeRO-3: parameters are freed after forward)."""
    model: nn.Module = PlainLlama(work)
    rank, ranks = (0, 1) if variant == "single" else (dist.get_rank(), dist.get_world_size())
    context: Callable[[], contextlib.AbstractContextManager[Any]] = partial(autocast, work)
    if variant == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif variant == "fsdp2":
        shard(model, work)
        context = contextlib.nullcontext  # FSDP2 has its own mixed precision
    optimizer = adamw(work, model.parameters())

    def step(number: int) -> float:
        tokens, labels = work.share(number, rank, ranks)
        return train_step(model, optimizer, tokens, labels, context)

    return step


def shard(model: nn.Module, work: Workload) -> None:
    """Each layer is one unit, the rest the root's."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings: dict[str, Any] = {}
    if work.dtype == "bfloat16":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = model.get_submodule("layers")
    for layer in layers.children():
        fully_shard(layer, **settings)
    fully_shard(model, **settings)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    labels: Tensor,
    context: Callable[[], contextlib.AbstractContextManager[Any]],
    backward: Callable[[Tensor], object] = torch.Tensor.backward,
) -> float:
    """The loop body that every tutorial has."""
    with context():
        loss = token_loss(model(tokens), labels)
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())
