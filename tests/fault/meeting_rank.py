"""A rank that torchrun starts again while its store still has the addresses of the first attempt.

`python -m tests.fault.meeting_rank join | plain`: by the program's own meeting, or by torch's as it is.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.recovery.meeting import join


def main() -> None:
    rank, again = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0
    if again and rank == 0:
        time.sleep(2)  # so that the other one finds what the first attempt left, if it can
    if sys.argv[1] == "join":
        join("gloo", timedelta(seconds=60))
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total = torch.ones(1)
    dist.all_reduce(total)
    if not again and rank == 1:
        os._exit(3)
    dist.barrier()
    sys.stdout.write(f"sum {int(total)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
