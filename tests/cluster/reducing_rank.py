"""A rank that reduces one tensor and says what its host's link carried meanwhile.

`python -m tests.cluster.reducing_rank INTERFACE ELEMENTS ROUNDS`, started by torchrun.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from tests.cluster.hosts import link_counters


def main() -> None:
    interface, elements, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    tensor = torch.full((elements,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor.clone())  # connections are made on the first use
    dist.barrier()
    before = link_counters(interface)
    dist.barrier()  # no rank of this host sends before all have read the counter
    began = time.perf_counter()
    for _ in range(rounds):
        result = tensor.clone()
        dist.all_reduce(result)
    seconds = time.perf_counter() - began
    dist.barrier()
    moved = link_counters(interface) - before
    expected = sum(range(1, dist.get_world_size() + 1))
    right = bool((result == expected).all())
    said = {"sent": moved.sent, "received": moved.received, "seconds": seconds, "right": right}
    sys.stdout.write(json.dumps(said) + "\n")  # print() writes the end of the line by itself, and ranks share the pipe
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # the transport's destructors abort now and then


if __name__ == "__main__":
    main()
