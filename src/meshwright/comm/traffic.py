"""What is sent: every ``c10d`` and ``_c10d_functional`` operation, by mesh axis, operation and phase.

Operations are read by their schema, each once. What ``comm.collectives`` does with several transport
operations (a direct exchange is P-1 sends) is entered under the name of the collective: payload and
message count as the collective was handed them, wire bytes as its transport operations put them there.

Wire bytes of one rank, group of P, n payload bytes (an all-gather's payload is this rank's part):

    operation        Gloo              NCCL (ring)
    all_reduce       2 (P-1)/P n       2 (P-1)/P n
    reduce_scatter   2 (P-1)/P n       (P-1)/P n        Gloo's own is an all-reduce inside; ours is sends
    all_gather       (P-1) n           (P-1) n
    all_to_all       (P-1)/P n         (P-1)/P n        uneven: all but the own part
    broadcast        n x children in a binomial tree    n
    send             n                 n
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.phase import current_phase
from meshwright.ledger.ledger import Send

Key = tuple[str, str, str]
"""Axis, operation, phase."""


@dataclass
class Count:
    """Running sums of one kind of traffic."""

    payload: int = 0
    wire: int = 0
    messages: int = 0


@dataclass(frozen=True)
class Transport:
    """One transport operation as its schema shows it."""

    operation: str
    group: dist.ProcessGroup
    payload: int
    own: int = 0
    """All-to-all: bytes of the part that stays here."""
    root: int = -1
    """Broadcast: the group rank that has the tensor."""

    def wire(self, backend: str) -> int:
        """Bytes this rank puts on its link."""
        degree, payload = self.group.size(), self.payload
        match self.operation:
            case "all_reduce":
                return 2 * (degree - 1) * payload // degree
            case "reduce_scatter":
                factor = 2 if backend == "gloo" else 1
                return factor * (degree - 1) * payload // degree
            case "all_gather":
                return (degree - 1) * payload
            case "all_to_all":
                return payload - self.own
            case "send" | "reduce" | "gather" | "scatter":
                return payload
            case "broadcast":
                return payload * (_children(self.group.rank(), self.root, degree) if backend == "gloo" else 1)
            case _:
                return 0


def _children(rank: int, root: int, degree: int) -> int:
    """How many ranks this one passes a broadcast on to: v sends to v + 2^i for every 2^i > v."""
    virtual, count, step = (rank - root) % degree, 0, 1
    while step < degree:
        count += step > virtual and virtual + step < degree
        step *= 2
    return count


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements of all ``tensors``."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _flat(nested: Any) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested]
    return [tensor for part in nested for tensor in _flat(part)]


_OPERATIONS: dict[str, tuple[str, str]] = {
    # c10d: operation, name of the argument that holds what this rank hands in
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::_allgather_base_": ("all_gather", "input_tensor"),
    "c10d::allgather_": ("all_gather", "input_tensors"),
    "c10d::allgather_coalesced_": ("all_gather", "input_list"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "input_tensors"),
    "c10d::scatter_": ("scatter", "input_tensors"),
    "c10d::send": ("send", "tensors"),
    "c10d::barrier": ("barrier", ""),
    # functional
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "inputs"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::isend": ("send", "tensor"),
}
_SILENT = frozenset(
    ("c10d::recv_", "c10d::recv_any_source_", "c10d::check_for_nan", "c10d::monitored_barrier_")
) | frozenset(("_c10d_functional::irecv", "_c10d_functional::wait_tensor"))
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Transport | None:
    """The transport operation that a dispatched call is; None for receives and waits.

    Raises:
        NotImplementedError: an operation this module does not know: it must not go uncounted.
    """
    schema = func._schema
    name = schema.name.replace("_c10d_functional_autograd::", "_c10d_functional::")
    if name in _SILENT:
        return None
    if name not in _OPERATIONS:
        raise NotImplementedError(f"traffic: operation {name} has no counting rule")
    operation, source = _OPERATIONS[name]
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    group = _group(values)
    tensors = _flat(values[source]) if source else []
    payload, own, root = nbytes(tensors), 0, -1
    if operation == "all_to_all":
        own = _own_part(values, tensors, group)
    elif operation == "broadcast":
        root = int(values["root_rank"] if "root_rank" in values else dist.get_group_rank(group, values["src"]))
        payload = payload if group.rank() == root else 0
    return Transport(operation, group, payload, own, root)


def _group(values: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in values:
        group = values["process_group"]
        return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
    name = values["group_name"]
    return name if isinstance(name, dist.ProcessGroup) else torch._C._distributed_c10d._resolve_process_group(name)


def _own_part(values: dict[str, Any], tensors: list[Tensor], group: dist.ProcessGroup) -> int:
    if "input_tensors" in values:
        return nbytes(tensors[group.rank() : group.rank() + 1])
    splits = values["input_split_sizes"]
    if not splits:
        return nbytes(tensors) // group.size()
    rows = sum(splits)
    return nbytes(tensors) * int(splits[group.rank()]) // rows if rows else 0


class Traffic:
    """Sums of what was sent.

    Args:
        axis_of: names the mesh axis of a group.
        backend: whose algorithms the wire bytes are of.
    """

    def __init__(self, axis_of: Callable[[dist.ProcessGroup], str], backend: str) -> None:
        self.axis_of, self.backend = axis_of, backend
        self.counts: dict[Key, Count] = defaultdict(Count)
        self.transport: dict[str, Count] = defaultdict(Count)
        """By transport operation: the same traffic as a process group's own books would show it."""

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one dispatched operation. Groups of one rank send nothing."""
        transport = read(func, args, kwargs)
        if transport is None:
            return
        raw = self.transport[transport.operation]
        wire = transport.wire(self.backend)
        raw.payload, raw.wire, raw.messages = raw.payload + transport.payload, raw.wire + wire, raw.messages + 1
        if transport.group.size() == 1:
            return
        if _inside is not None:
            self.add_wire(_inside, wire)
            return
        count = self.counts[self.axis_of(transport.group), transport.operation, current_phase()]
        count.payload, count.wire = count.payload + transport.payload, count.wire + wire
        count.messages += 1

    def add_wire(self, key: Key, nbytes: int) -> None:
        """Enter bytes that a collective put on the link."""
        if key != _EARLIER:
            self.counts[key].wire += nbytes

    def sends(self) -> tuple[Send, ...]:
        """The sums, in a fixed order."""
        return tuple(
            Send(axis=axis, operation=operation, phase=phase, **vars(count))
            for (axis, operation, phase), count in sorted(self.counts.items())
        )


_EARLIER: Key = ("", "", "")
"""A collective that began when nothing was counted: all of it is of an earlier step."""
_active: Traffic | None = None
_inside: Key | None = None
"""The collective whose transport operations are being issued."""


def activate(traffic: Traffic | None) -> None:
    """Make ``traffic`` the one that ``operation`` reports to."""
    global _active
    _active = traffic


def recording() -> bool:
    """Whether what is sent is being counted."""
    return _active is not None


def moved(nbytes: int) -> None:
    """Enter bytes that went to other ranks without a transport operation, as wire bytes of the collective around."""
    if _active is not None and _inside is not None:
        _active.add_wire(_inside, nbytes)


@contextmanager
def operation(group: dist.ProcessGroup, name: str, payload: int) -> Iterator[Key | None]:
    """Enter everything sent inside as one call of the collective ``name`` with ``payload`` bytes.

    Yields what ``resumed`` needs to enter later transport operations of the same call.
    """
    global _inside
    if _active is None or _inside is not None or group.size() == 1:
        yield _inside
        return
    key = (_active.axis_of(group), name, current_phase())
    count = _active.counts[key]
    count.payload, count.messages = count.payload + payload, count.messages + 1
    with resumed(key):
        yield key


@contextmanager
def resumed(key: Key | None) -> Iterator[None]:
    """Enter what is sent inside as wire bytes of an operation that began earlier."""
    global _inside
    before, _inside = _inside, (key or _EARLIER) if _active is not None else None
    try:
        yield
    finally:
        _inside = before
