"""Small distributed programs to be recorded; each runs one steady step inside ``recorded``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from meshwright.comm.collectives import all_gather, all_reduce, all_to_all, barrier, reduce_scatter
from meshwright.comm.phase import phase

Recorded = Callable[[], AbstractContextManager[object]]
SIZES = (1, 7, 1000, 50_003)


def own_collectives(group: dist.ProcessGroup, recorded: Recorded) -> None:
    """Every collective of ours, small and large, of several dtypes, waited for at once and later."""
    degree = group.size()
    with recorded():
        for size in SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                whole, part = torch.ones(degree * size, dtype=dtype), torch.ones(size, dtype=dtype)
                with phase("forward"):
                    all_gather(whole, part, group)
                    later = reduce_scatter(part, whole, group, asynchronous=True)
                with phase("backward"):
                    assert later is not None
                    later.wait()
                    all_to_all(torch.empty_like(whole), whole, group)
                reduction = all_reduce(part, group, asynchronous=True)
                with phase("reduce"):
                    assert reduction is not None
                    reduction.wait()
                    all_reduce(whole, group, ordered=True)
                    dist.broadcast(part, group=group, group_src=degree - 1)
        all_reduce(torch.ones(3), group, op="max")
        barrier(group)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.silu(self.inner(x)))


def network(width: int = 37, layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def fsdp(group: dist.ProcessGroup, recorded: Recorded, *, fake: bool = False) -> None:
    """Torch's own FSDP2 with its own collectives, 16-bit parameters, float32 reduction."""
    with torch.device("meta"):
        model = network()
    mesh = DeviceMesh.from_group(group, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.set_force_sum_reduction_for_comms(True)
    # Sharded on meta, outside: fully_shard itself does not run on fake tensors.
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    with mode:
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        for step in range(3):
            with recorded() if step == 2 else torch.enable_grad():
                for _ in range(2):
                    with phase("forward"):
                        loss = model(torch.ones(5, 37)).float().sum()
                    with phase("backward"):
                        loss.backward()
                model.zero_grad()


def pipeline(group: dist.ProcessGroup, recorded: Recorded) -> None:
    """Torch's own one-forward-one-backward schedule, a stage on each rank, six micro-batches."""
    rank, degree = group.rank(), group.size()
    layer = Layer(37)
    stage = PipelineStage(layer, rank, degree, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 6, loss_fn=lambda output, _target: output.sum())
    for step in range(3):
        with recorded() if step == 2 else torch.enable_grad(), phase("forward"):
            if rank == 0:
                schedule.step(torch.ones(12, 37))
            elif rank == degree - 1:
                schedule.step(target=torch.ones(12, 37))
            else:
                schedule.step()
        layer.zero_grad()
