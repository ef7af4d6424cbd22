"""What one device does with the same job: the yardstick of the useful speed-up."""

from __future__ import annotations

import statistics
import time

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Loader
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.job.memory import model_state_bytes
from meshwright.job.sync_section import SyncSection
from meshwright.train.trainer import Trainer
from meshwright.train.worker import choose_device

_ROOM = 1.5
"""Times the model's state that must be free: activations and buffers take their part."""
_MOST_SECONDS = 120.0
"""No step begins after this long; those that were measured count."""


def one_device_tokens_per_second(job: Job, *, threads: int) -> float | None:
    """Median valid tokens a second of this process alone on the job's own global batches.

    The same model, data, precision, optimizer, micro-batch and threads as one rank has. None when
    ``observe.one_device_steps`` is 0, one device cannot hold the model, or it needs minutes for a step.
    """
    steps = job.observe.one_device_steps
    if not steps:
        return None
    alone = job.model_copy(
        update={
            "layout": Layout(micro_batch=job.layout.micro_batch, recompute=job.layout.stage_recompute(0)),
            "cluster": job.cluster.model_copy(update={"ranks": 1}),
            "sync": SyncSection(),
            "batch": job.batch.model_copy(update={"split": None, "micro_batch_limits": None}),
        }
    )
    device = choose_device(alone)
    if max(model_state_bytes(alone)) * _ROOM > _free_bytes(device):
        return None
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        with Mesh(alone.layout, device.type) as mesh:
            loader = Loader(alone, dp_rank=0, dp=1, device=device)
            trainer = Trainer(alone, mesh, device)
            rates: list[float] = []
            began = time.perf_counter()
            for step in range(steps + 1):
                if time.perf_counter() - began > _MOST_SECONDS:
                    break
                started = time.perf_counter()
                report = trainer.step(loader.batches(step))
                rates.append(report.valid_tokens / (time.perf_counter() - started))
            loader.close()
    finally:
        dist.destroy_process_group()
    return statistics.median(rates[1:]) if len(rates) > 1 else None


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
