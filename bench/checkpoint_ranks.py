"""What a rank does in the bench of checkpoints: apart from it, which runs as `__main__`, so that it can be pickled."""

from __future__ import annotations

import gc
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.checkpoint.load import load
from meshwright.checkpoint.placed import PlacedTensor
from meshwright.checkpoint.save import save
from meshwright.checkpoint.world import GroupWorld

ROWS, COLUMNS, TENSORS = 1024, 512, 19
"""19 matrices of 1024 x 512: 9,961,472 parameters."""
_ROLES = ("parameter", "exp_avg", "exp_avg_sq")


def _parts(rank: int, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    rows = ROWS // size
    return {
        f"{role}/layer.{number}": torch.randn(rows, COLUMNS, generator=generator)
        for number in range(TENSORS)
        for role in _ROLES
    }


def _placed(parts: dict[str, torch.Tensor], rank: int) -> list[PlacedTensor]:
    result = []
    for key, tensor in parts.items():
        role, _, name = key.partition("/")
        first = rank * tensor.shape[0]
        result.append(PlacedTensor(name, (ROWS, COLUMNS), (first, 0), tuple(tensor.shape), tensor, role))  # type: ignore[arg-type]
    return result


def _status(name: str) -> int:
    """Bytes of a memory figure of this process in /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _measured(action: Any) -> tuple[float, float]:
    """Seconds until all ranks are done, and bytes by which this rank's memory rose above where it was before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident set so far is the present one
    before = _status("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    seconds = time.perf_counter() - began
    return seconds, float(_status("VmHWM") - before)


def rounds_on_rank(folder: str, rounds: int) -> dict[str, list[float]]:
    """On every rank: save and load in turn; seconds of each, until all ranks are done, and bytes it takes meanwhile."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    parts = _parts(rank, size)
    placed = _placed(parts, rank)
    state: dict[str, Any] = {key: DTensor.from_local(tensor, mesh, [Shard(0)]) for key, tensor in parts.items()}
    world = GroupWorld()
    # DCP's thread exchanges its plans while the ranks go on: in their group the two could cross, and wait for ever.
    apart = dist.new_group()
    buffers = [torch.empty_like(tensor) for tensor in parts.values()]
    kinds = ("save", "load", "dcp_save", "dcp_load", "stall", "dcp_stall")
    seconds: dict[str, list[float]] = {name: [] for kind in kinds for name in (kind, f"{kind}_bytes")}

    def snapshot() -> None:
        for buffer, tensor in zip(buffers, parts.values(), strict=True):
            buffer.copy_(tensor)

    for number in range(rounds + 1):  # the first warms up both
        ours, theirs = Path(folder) / f"ours-{number}", Path(folder) / f"dcp-{number}"
        took = {"save": _measured(lambda ours=ours: save(ours, 1, placed, finite=True, world=world))}
        took["dcp_save"] = _measured(lambda theirs=theirs: dcp_save(state, checkpoint_id=theirs))
        took["load"] = _measured(lambda ours=ours: load(ours / "step-1", placed, world=world))
        took["dcp_load"] = _measured(lambda theirs=theirs: dcp_load(state, checkpoint_id=theirs))
        took["stall"] = _measured(snapshot)
        pending: list[Any] = []
        later = Path(folder) / f"later-{number}"
        took["dcp_stall"] = _measured(
            lambda later=later, to=pending: to.append(dcp_async_save(state, checkpoint_id=later, process_group=apart))
        )
        pending[0].result()
        dist.barrier()
        if rank == 0:
            for path in (ours, theirs, later):
                shutil.rmtree(path)
        if number:
            for kind, (value, growth) in took.items():
                seconds[kind].append(value)
                seconds[f"{kind}_bytes"].append(growth)
    seconds["peak_rss_bytes"] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0]
    return seconds
