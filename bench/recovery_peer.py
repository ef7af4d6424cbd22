"""The peer of the recovery bench: a plain DDP loop with DCP checkpoints, for `torchrun --max-restarts`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bench.contestants.torch_loops import adamw, train_step
from bench.plain_llama import PlainLlama
from bench.workload import Workload


def main(out: Path, steps: int, every: int, workload: Workload) -> None:
    """Train, save every so many steps, and go on from the newest checkpoint that is whole."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (out / f"rank-{rank}.pid").write_text(str(os.getpid()), encoding="ascii")
    model = nn.parallel.DistributedDataParallel(PlainLlama(workload))
    optimizer = adamw(workload, model.parameters())
    first = 0
    newest = max((int(path.parent.name) for path in out.glob("*/.metadata")), default=0)
    if newest:
        # The optimizer has a state, to be loaded into, from its first step on.
        train_step(model, optimizer, *workload.share(0, rank, ranks), contextlib.nullcontext)
        parts, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": parts, "optimizer": moments}
        dcp_load(state, checkpoint_id=out / str(newest))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = newest
    with (out / "steps.jsonl").open("a", encoding="utf-8", buffering=1) as lines:
        for step in range(first, steps):
            train_step(model, optimizer, *workload.share(step, rank, ranks), contextlib.nullcontext)
            if rank == 0:
                lines.write(json.dumps({"step": step + 1, "time": time.time()}) + "\n")
            if (step + 1) % every == 0:
                parts, moments = get_state_dict(model, optimizer)
                dcp_save({"model": parts, "optimizer": moments}, checkpoint_id=out / str(step + 1))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Workload(**json.loads(sys.argv[4])))
