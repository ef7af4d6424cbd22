"""One rank of one contestant: builds it, then steps when told and sleeps on a pipe in between."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Client
from pathlib import Path

from bench.contestants import Contestant
from bench.messages import Failed, Ready, Stepped
from bench.workload import Workload
from meshwright.recovery.rank import end_with_launcher


def memory_bytes(field: str) -> int:
    """``VmRSS`` (resident now) or ``VmHWM`` (at most so far)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def serve(address: str) -> None:
    """Take orders until the other end closes."""
    end_with_launcher()
    rank = int(os.environ["RANK"])
    with Client(address, family="AF_UNIX") as connection:
        connection.send(rank)
        contestant: Contestant
        work: Workload
        contestant, work = connection.recv()
        try:
            import torch

            from meshwright.recovery.loopback import join_here

            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            warnings.simplefilter("ignore")
            if int(os.environ["WORLD_SIZE"]) > 1:
                join_here()
            base = memory_bytes("VmRSS")
            step = contestant.build(work)
            connection.send(Ready(base))
            while True:
                first, count = connection.recv()
                wall, cpu = time.perf_counter(), time.process_time()
                losses = [step(number) for number in range(first, first + count)]
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                connection.send(Stepped(losses, wall, cpu, memory_bytes("VmHWM")))
        except EOFError:
            pass
        except Exception:
            connection.send(Failed(traceback.format_exc()))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
