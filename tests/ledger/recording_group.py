"""The independent count: a process group that keeps its own books, one layer below everything recorded.

It is a Python ``ProcessGroup`` around a Gloo group and sees what reaches the transport, not what was
dispatched: no schema, no mode, no rule of the recorder is shared with it.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "recording"
counts: Counter[str] = Counter()
"""Calls by operation, and bytes handed in by ``<operation> bytes``, of all recording groups of this process."""


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensor_bytes(tensors)
    return sum(_bytes(tensor) for tensor in tensors)


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * tensor.numel()


def note(operation: str, tensors: Any = ()) -> None:
    counts[operation] += 1
    counts[f"{operation} bytes"] += _bytes(tensors)


class RecordingGroup(dist.ProcessGroup):
    """Writes down each call and passes it on."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.inner = dist.ProcessGroup(store, rank, size)
        self.inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self.inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    # A group without registered backends has nowhere to keep its name.
    def _set_group_name(self, name: str) -> None:
        self._name = name
        self.inner._set_group_name(name)

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:  # noqa: N802  # the name torch calls
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        note("all_reduce", tensors)
        return self.inner.allreduce(tensors, *args, **kwargs)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        note("all_gather", inputs)
        return self.inner.allgather(outputs, inputs, *args, **kwargs)

    def all_gather_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        note("all_gather", input)
        return self.inner.all_gather_single(output, input, *args, **kwargs)

    def reduce_scatter_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        note("reduce_scatter", input)
        return self.inner.reduce_scatter_single(output, input, *args, **kwargs)

    def all_to_all_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        note("all_to_all", input)
        return self.inner.all_to_all_single(output, input, *args, **kwargs)

    def broadcast(self, tensors: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        note("broadcast", tensors if options.rootRank == self.rank() else ())
        return self.inner.broadcast(tensors, options, *args, **kwargs)

    def send(self, tensors: Any, *args: Any) -> Any:
        note("send", tensors)
        return self.inner.send(tensors, *args)

    def recv(self, tensors: Any, *args: Any) -> Any:
        return self.inner.recv(tensors, *args)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        note("barrier")
        return self.inner.barrier(*args, **kwargs)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> RecordingGroup:
    return RecordingGroup(store, rank, size, timeout)


def recording_group() -> dist.ProcessGroup:
    """A recording group of all ranks."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    group = dist.new_group(list(range(dist.get_world_size())), backend=BACKEND)
    counts.clear()
    return group
