"""The store of ranks that all live on this machine: on loopback, where nobody else can reach it.

torch's own way, ``init_process_group`` by its variables, listens on every interface.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_HOST = "127.0.0.1"
_AS_TORCH = timedelta(minutes=30)
"""What torch gives the store of a Gloo group."""


def loopback_store(port: int, world_size: int, timeout: timedelta, *, first: bool) -> TCPStore:
    """The store at a port of loopback; ``first`` opens it, at a port of its own for 0, and the others come to it."""
    if not first:
        return TCPStore(_HOST, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((_HOST, port))
    listener.listen(1024)
    port = int(listener.getsockname()[1])
    return TCPStore(
        _HOST, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def join_here() -> None:
    """``init_process_group`` over Gloo with the ranks, all of this machine, that torch's variables speak of."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = loopback_store(int(os.environ["MASTER_PORT"]), size, _AS_TORCH, first=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
