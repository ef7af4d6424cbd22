"""Collectives: the one place that knows Gloo from NCCL.

On CPU tensors (Gloo) they are direct exchanges (``comm.exchange``): faster than Gloo's own
reduce-scatter (an all-reduce inside) and all-gather, and sums are taken **in rank order**, so their
bits do not depend on the transport. With P ranks and n bytes of input, each rank sends

    reduce_scatter  (P-1)/P n      all_gather  (P-1) n (n: one rank's part)      all_reduce  2 (P-1)/P n

or, while that is at most ``ONE_ROUND_BYTES``, an all_reduce is one round of (P-1) n. Above, where ranks
share no memory, Gloo's own is as fast as any two rounds, and serves where the order does not matter.
On CUDA tensors (NCCL) they are the native operations; ``ordered=True`` sums in rank order there too.
16-bit floats travel as they are and are added in float32, rounded once (NCCL's own sums are not).

All take ``group``, the process group; and ``asynchronous``: return a :class:`Handle` at once, and leave
inputs and outputs alone until its ``wait``. Every rank of the group must call them in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.exchange import (
    LOW_PRECISION,
    Combine,
    collect,
    combine_in_rank_order,
    is_small,
    pieces,
    post,
    spread,
    swap,
)
from meshwright.comm.position import started
from meshwright.comm.shared_memory import channel_of
from meshwright.comm.timeline import blocked
from meshwright.comm.traffic import Key, nbytes, operation, resumed

ONE_ROUND_BYTES = 512 * 1024
"""An all-reduce sends everything to everybody while that is no more than this: two rounds would cost more latency."""

_REDUCTIONS: dict[str, tuple[Combine, dist.ReduceOp.RedOpType]] = {
    "sum": (torch.add, dist.ReduceOp.SUM),
    "max": (torch.maximum, dist.ReduceOp.MAX),
    "min": (torch.minimum, dist.ReduceOp.MIN),
}


class Handle(dist.Work):
    """An operation on its way; ``wait`` finishes it, the local additions included.

    A subclass of ``dist.Work`` because FSDP2 waits for nothing else.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, works: Sequence[Any], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._group, self._name = group, name
        self._works: Sequence[Any] = works
        self._finish = finish
        self._done = False
        self._sequence = started(group) if group.size() > 1 else 0

    @property
    def group(self) -> dist.ProcessGroup:
        """Whose operation it is."""
        return self._group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in the output; further calls return at once."""
        if not self._done:
            self._done = True
            if self._works:
                with blocked(self._group, self._name, self._sequence):
                    for work in self._works:
                        work.wait()
            finish, self._works, self._finish = self._finish, (), None
            if finish is not None:
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


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.view(-1)


def _is_direct(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _single(new: str, old: str) -> Callable[..., Any]:
    """The operation under its name in torch >= 2.13, or its older one."""
    function: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return function


def own_piece_is_read_late(input: Tensor) -> bool:
    """Whether an asynchronous ``reduce_scatter`` of ``input`` reads this rank's own piece only in ``wait``.

    Then that piece may still be computed while the others are on their way.
    """
    return _is_direct(input) and not is_small(input)


def reduce_scatter(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, ordered: bool = False, asynchronous: bool = False
) -> Handle | None:
    """Sum ``input`` over the group; rank r gets the r-th of its P equal pieces in ``output``.

    Args:
        output: contiguous, ``[n]`` elements; may be this rank's piece of ``input``; may be wider than it.
        input: contiguous, ``[P * n]`` elements.
        group: the P ranks.
        ordered: on CUDA too, add in rank order.
        asynchronous: see the module.
    """
    degree, flat, mine = group.size(), _flat(input), _flat(output)
    if flat.numel() != degree * mine.numel():
        raise ValueError(f"reduce_scatter: {flat.numel()} elements do not make {degree} x {mine.numel()}")
    if degree == 1:
        combine_in_rank_order(mine, [flat], 0)
        return _settle(Handle(group, "reduce_scatter", ()), asynchronous)
    with operation(group, "reduce_scatter", nbytes([flat])):
        handle = _start_reduce_scatter(mine, flat, group, ordered)
    return _settle(handle, asynchronous)


def _start_reduce_scatter(mine: Tensor, flat: Tensor, group: dist.ProcessGroup, ordered: bool) -> Handle:
    if _is_direct(flat) and not is_small(flat):
        works, finish = collect(group, pieces(flat, group.size()), mine, torch.add)
        return Handle(group, "reduce_scatter", works, finish)
    if _is_direct(flat) or ordered or mine.dtype != flat.dtype:
        arrived = torch.empty_like(flat)
        works = swap(group, arrived, flat)
        parts = pieces(arrived, group.size())
        return Handle(group, "reduce_scatter", works, lambda: combine_in_rank_order(mine, parts, -1))
    work = _single("reduce_scatter_single", "reduce_scatter_tensor")(mine, flat, group=group, async_op=True)
    return Handle(group, "reduce_scatter", (work,))


def all_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, asynchronous: bool = False
) -> Handle | None:
    """Every rank's ``input``, in rank order, into ``output`` on every rank. Any dtype.

    Args:
        output: contiguous, ``[P * n]`` elements.
        input: contiguous, ``[n]`` elements; may be this rank's piece of ``output``.
        group: the P ranks.
        asynchronous: see the module.
    """
    degree, flat, mine = group.size(), _flat(output), _flat(input)
    if flat.numel() != degree * mine.numel():
        raise ValueError(f"all_gather: {flat.numel()} elements do not hold {degree} x {mine.numel()}")
    if degree == 1:
        combine_in_rank_order(flat, [mine], 0)
        return _settle(Handle(group, "all_gather", ()), asynchronous)
    with operation(group, "all_gather", nbytes([mine])):
        if _is_direct(mine):
            works = spread(group, flat, mine)
        else:
            gather = _single("all_gather_single", "all_gather_into_tensor")
            works = [gather(flat, mine, group=group, async_op=True)]
    return _settle(Handle(group, "all_gather", works), asynchronous)


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, *, op: str = "sum", ordered: bool = False, asynchronous: bool = False
) -> Handle | None:
    """Reduce ``tensor`` over the group in place; the same bits on every rank.

    ``ordered``, and on CPU up to ``ONE_ROUND_BYTES`` always, in rank order. A large ordered one is a
    reduce-scatter and an all-gather without any padding, and, asynchronous, gathers inside ``wait``.

    Args:
        tensor: contiguous.
        group: the ranks.
        op: ``"sum"``, ``"max"`` or ``"min"`` (NaN wins both on CPU).
        ordered: combine in rank order whatever the size and device.
        asynchronous: see the module.
    """
    flat = _flat(tensor)
    if group.size() == 1 or flat.numel() == 0:
        return _settle(Handle(group, "all_reduce", ()), asynchronous)
    with operation(group, "all_reduce", nbytes([flat])) as key:
        handle = _start_all_reduce(flat, group, op, ordered, key)
    return _settle(handle, asynchronous)


def _start_all_reduce(flat: Tensor, group: dist.ProcessGroup, op: str, ordered: bool, key: Key | None) -> Handle:
    combine, native = _REDUCTIONS[op]
    degree, direct = group.size(), _is_direct(flat)
    little = direct and (degree - 1) * nbytes([flat]) <= ONE_ROUND_BYTES
    # Gloo adds 16-bit floats slowly and rounds each time, and its max and min lose NaN.
    by_backend = not direct or (op == "sum" and flat.dtype not in LOW_PRECISION and channel_of(group) is None)
    if not ordered and not little and by_backend:
        return Handle(group, "all_reduce", [dist.all_reduce(flat, op=native, group=group, async_op=True)])
    if little or not direct:
        gathered = flat.new_empty(degree * flat.numel())
        if direct:
            works = spread(group, gathered, flat, at_once=True)
        else:
            gather = _single("all_gather_single", "all_gather_into_tensor")
            works = [gather(gathered, flat, group=group, async_op=True)]
        parts = pieces(gathered, degree)
        return Handle(group, "all_reduce", works, lambda: combine_in_rank_order(flat, parts, -1, combine))
    parts = pieces(flat, degree)
    own = parts[group.rank()]
    works, add = collect(group, parts, own, combine)

    def finish() -> None:
        add()
        with resumed(key):
            gathering = post(group, [own] * degree, parts)
        Handle(group, "all_reduce", gathering).wait()

    return Handle(group, "all_reduce", works, finish)


def all_to_all(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, asynchronous: bool = False
) -> Handle | None:
    """The r-th of P equal pieces of ``input`` goes to rank r; ``output`` holds what came, in rank order."""
    degree, sent, arrived = group.size(), _flat(input), _flat(output)
    if sent.numel() != arrived.numel() or sent.numel() % degree:
        raise ValueError(f"all_to_all: {sent.numel()} to {arrived.numel()} elements over {degree} ranks")
    if degree == 1:
        combine_in_rank_order(arrived, [sent], 0)
        return _settle(Handle(group, "all_to_all", ()), asynchronous)
    with operation(group, "all_to_all", nbytes([sent])):
        if _is_direct(sent):
            works = swap(group, arrived, sent)
        else:
            works = [dist.all_to_all_single(arrived, sent, group=group, async_op=True)]
    return _settle(Handle(group, "all_to_all", works), asynchronous)


def barrier(group: dist.ProcessGroup) -> None:
    """Return once every rank of the group has come here."""
    if group.size() > 1:
        with blocked(group, "barrier"):
            dist.barrier(group)


def all_gather_json(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's ``value`` on every rank, in rank order, as JSON bytes (control messages; never pickle)."""
    on_device = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = torch.empty(group.size(), dtype=torch.int64, device=device)
    all_gather(lengths, torch.tensor([text.numel()], device=device), group)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    gathered = torch.empty(group.size() * longest, dtype=torch.uint8, device=device)
    all_gather(gathered, padded, group)
    rows = gathered.view(group.size(), longest).cpu()
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths.tolist(), strict=True)]
