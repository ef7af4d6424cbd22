"""Collectives: the one place that knows Gloo from NCCL.

On CPU tensors (Gloo) everything large is a direct exchange: each rank sends every other rank what it
needs in one message, and sums are local additions **in rank order**, so their bits do not depend on
the transport. That beats Gloo's own reduce-scatter (which is an all-reduce inside) and all-gather by
two to three times; ``bench/collectives.py`` measures it. With P ranks and n bytes of input:

    reduce_scatter   (P-1)/P n  sent per rank      all_gather   (P-1) n  sent per rank (n: one rank's part)

On CUDA tensors (NCCL) the native operations are used; ``ordered=True`` still sums in rank order.
16-bit floats are exchanged as they are, added in float32 and rounded once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.timeline import blocked

SMALL_BYTES = 32 * 1024
"""Up to this size an all-reduce costs latency, not bandwidth: it is one round of messages."""

_REDUCTIONS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Handle(dist.Work):
    """An operation on its way; ``wait`` finishes it, the local additions included.

    A subclass of ``dist.Work`` because FSDP2 waits for nothing else.
    """

    def __init__(
        self, group: dist.ProcessGroup, operation: str, works: Sequence[Any], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._group, self._operation = group, operation
        self._works: Sequence[Any] = works
        self._finish = finish
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in the output; further calls return at once."""
        if not self._done:
            self._done = True
            with blocked(self._group, self._operation):
                for work in self._works:
                    work.wait()
            self._works = ()
            if self._finish is not None:
                finish, self._finish = self._finish, None
                finish()
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` has been called."""
        return self._done


def _settle(handle: Handle, asynchronous: bool) -> Handle | None:
    if asynchronous:
        return handle
    handle.wait()
    return None


def _is_direct(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _single(new: str, old: str) -> Callable[..., Any]:
    """The operation under its name in torch >= 2.13, or its older one."""
    operation: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return operation


def pieces(length: int, degree: int) -> list[tuple[int, int]]:
    """(start, stop) of each rank's piece of ``length`` elements: ceil(length / degree) each, the last ones shorter."""
    size = -(-length // degree)
    return [(min(rank * size, length), min((rank + 1) * size, length)) for rank in range(degree)]


def _post(group: dist.ProcessGroup, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> list[Any]:
    """Start sending ``sends[r]`` to rank r and receiving ``receives[r]`` from it; own and empty entries are skipped."""
    rank, degree = group.rank(), group.size()
    works = []
    for distance in range(1, degree):
        peer = (rank - distance) % degree
        target = receives[peer]
        if target is not None and target.numel():
            works.append(group.recv([target], peer, 0))
    for distance in range(1, degree):
        peer = (rank + distance) % degree
        source = sends[peer]
        if source is not None and source.numel():
            works.append(group.send([source], peer, 0))
    return works


def _add_in_rank_order(output: Tensor, parts: Sequence[Tensor], own: int) -> None:
    """``output`` = ((parts[0] + parts[1]) + parts[2]) + ...; received parts are overwritten, ``parts[own]`` is not.

    ``output`` may be ``parts[own]`` itself.
    """
    if len(parts) == 1:
        if output.data_ptr() != parts[0].data_ptr():
            output.copy_(parts[0])
    elif len(parts) == 2:
        torch.add(parts[0], parts[1], out=output)
    elif output.dtype in _LOW_PRECISION:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        output.copy_(total)
    else:
        total = parts[1] if own == 0 else parts[0]
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:-1]:
            total.add_(part)
        torch.add(total, parts[-1], out=output)


def reduce_scatter(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, ordered: bool = False, asynchronous: bool = False
) -> Handle | None:
    """Sum ``input`` over the group; rank r gets the r-th of its P equal pieces in ``output``.

    On CPU always in rank order. ``input`` must stay unchanged until the end; ``output`` may be this
    rank's piece of it.

    Args:
        output: contiguous, ``[n]`` elements.
        input: contiguous, ``[P * n]`` elements.
        group: the P ranks.
        ordered: on CUDA too, add in rank order.
        asynchronous: return a handle at once.
    """
    degree = group.size()
    if input.numel() != degree * output.numel():
        raise ValueError(f"reduce_scatter: {input.numel()} elements do not make {degree} x {output.numel()}")
    flat, mine = input.detach().view(-1), output.detach().view(-1)
    if degree == 1:
        _add_in_rank_order(mine, [flat], 0)
        return _settle(Handle(group, "reduce_scatter", ()), asynchronous)
    if not _is_direct(input) and not ordered:
        work = _single("reduce_scatter_single", "reduce_scatter_tensor")(mine, flat, group=group, async_op=True)
        return _settle(Handle(group, "reduce_scatter", (work,)), asynchronous)
    parts = flat.view(degree, output.numel()).unbind()
    if not _is_direct(input):
        received = torch.empty_like(flat)
        work = dist.all_to_all_single(received, flat, group=group, async_op=True)
        arrived = received.view(degree, output.numel()).unbind()
        finish = lambda: _add_in_rank_order(mine, arrived, -1)  # noqa: E731
        return _settle(Handle(group, "reduce_scatter", (work,), finish), asynchronous)
    return _settle(_exchange_and_add(group, mine, parts), asynchronous)


def _exchange_and_add(group: dist.ProcessGroup, output: Tensor, parts: Sequence[Tensor]) -> Handle:
    """Send ``parts[r]`` to rank r; ``output`` becomes the rank-ordered sum of all ranks' parts for this one."""
    rank, degree = group.rank(), group.size()
    scratch = output.new_empty((degree - 1, output.numel()))
    arrived = [parts[rank] if peer == rank else scratch[peer - (peer > rank)] for peer in range(degree)]
    works = _post(group, parts, arrived)
    return Handle(group, "reduce_scatter", works, lambda: _add_in_rank_order(output, arrived, rank))


def all_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, asynchronous: bool = False
) -> Handle | None:
    """Every rank's ``input``, in rank order, into ``output`` on every rank.

    Args:
        output: contiguous, ``[P * n]`` elements.
        input: contiguous, ``[n]`` elements; may be this rank's piece of ``output``. Any dtype.
        group: the P ranks.
        asynchronous: return a handle at once.
    """
    degree = group.size()
    if output.numel() != degree * input.numel():
        raise ValueError(f"all_gather: {output.numel()} elements do not hold {degree} x {input.numel()}")
    flat, mine = output.detach().view(-1), input.detach().view(-1)
    if degree > 1 and not _is_direct(input):
        work = _single("all_gather_single", "all_gather_into_tensor")(flat, mine, group=group, async_op=True)
        return _settle(Handle(group, "all_gather", (work,)), asynchronous)
    parts = flat.view(degree, input.numel()).unbind()
    works = _post(group, [mine] * degree, parts)
    own = parts[group.rank()]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    return _settle(Handle(group, "all_gather", works), asynchronous)


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, *, op: str = "sum", ordered: bool = False, asynchronous: bool = False
) -> Handle | None:
    """Reduce ``tensor`` over the group in place; the same bits on every rank.

    Large CPU sums are a direct reduce-scatter and all-gather (in rank order whatever ``ordered``
    says); small ones are the backend's own unless ``ordered``. An asynchronous large sum gathers
    inside ``wait``.

    Args:
        tensor: contiguous.
        group: the ranks.
        op: ``"sum"``, ``"max"`` or ``"min"``.
        ordered: add in rank order.
        asynchronous: return a handle at once.
    """
    degree, flat = group.size(), tensor.detach().view(-1)
    if degree == 1 or flat.numel() == 0:
        return _settle(Handle(group, "all_reduce", ()), asynchronous)
    small = flat.numel() * flat.element_size() <= SMALL_BYTES
    if op != "sum" or (not ordered and (small or not _is_direct(tensor))):
        work = dist.all_reduce(flat, op=_REDUCTIONS[op], group=group, async_op=True)
        return _settle(Handle(group, "all_reduce", (work,)), asynchronous)
    if small or not _is_direct(tensor):
        return _settle(_gather_and_add(group, flat), asynchronous)
    parts = [flat[start:stop] for start, stop in pieces(flat.numel(), degree)]
    own = parts[group.rank()]
    scatter = _exchange_and_add(group, own, parts)

    def finish() -> None:
        scatter.wait()
        Handle(group, "all_reduce", _post(group, [own] * degree, parts)).wait()

    return _settle(Handle(group, "all_reduce", (), finish), asynchronous)


def _gather_and_add(group: dist.ProcessGroup, flat: Tensor) -> Handle:
    gathered = flat.new_empty(group.size() * flat.numel())
    gather = all_gather(gathered, flat, group, asynchronous=True)
    parts = gathered.view(group.size(), -1).unbind()
    return Handle(group, "all_reduce", (gather,), lambda: _add_in_rank_order(flat, parts, -1))


def all_to_all(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, asynchronous: bool = False
) -> Handle | None:
    """The r-th of P equal pieces of ``input`` goes to rank r; ``output`` holds what came, in rank order."""
    degree, sent, arrived = group.size(), input.detach().view(-1), output.detach().view(-1)
    if sent.numel() != arrived.numel() or sent.numel() % degree:
        raise ValueError(f"all_to_all: {sent.numel()} to {arrived.numel()} elements over {degree} ranks")
    if degree > 1 and not _is_direct(input):
        work = dist.all_to_all_single(arrived, sent, group=group, async_op=True)
        return _settle(Handle(group, "all_to_all", (work,)), asynchronous)
    sends, receives = (flat.view(degree, flat.numel() // degree).unbind() for flat in (sent, arrived))
    works = _post(group, sends, receives)
    receives[group.rank()].copy_(sends[group.rank()])
    return _settle(Handle(group, "all_to_all", works), asynchronous)


def broadcast(
    tensor: Tensor, group: dist.ProcessGroup, *, source: int = 0, asynchronous: bool = False
) -> Handle | None:
    """Copy ``tensor`` from the group's rank ``source`` to all its ranks."""
    if group.size() == 1 or tensor.numel() == 0:
        return _settle(Handle(group, "broadcast", ()), asynchronous)
    work = dist.broadcast(tensor, group=group, group_src=source, async_op=True)
    return _settle(Handle(group, "broadcast", (work,)), asynchronous)


def barrier(group: dist.ProcessGroup) -> None:
    """Return once every rank of the group has come here."""
    if group.size() > 1:
        with blocked(group, "barrier"):
            dist.barrier(group)


def _control_device(group: dist.ProcessGroup) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_gather_json(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's ``value`` on every rank, in rank order, as JSON bytes (control messages; never pickle)."""
    device = _control_device(group)
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = torch.empty(group.size(), dtype=torch.int64, device=device)
    all_gather(lengths, torch.tensor([text.numel()], device=device), group)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    gathered = torch.empty(group.size() * longest, dtype=torch.uint8, device=device)
    all_gather(gathered, padded, group)
    rows = gathered.view(group.size(), longest).cpu()
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths.tolist(), strict=True)]
