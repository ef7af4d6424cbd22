"""Direct exchange on CPU: every rank sends every other rank one message; sums are local, in rank order.

Between ranks of one host they go through memory that the ranks share (``comm.shared_memory``), where a mesh has
opened it. Otherwise large exchanges are plain sends and receives (no copies, no staging); small ones one all-to-all,
which wakes fewer threads. ``bench/collectives.py`` holds all of them against Gloo's own collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.comm.shared_memory import Arrival, Channel, Coming, channel_of
from meshwright.comm.traffic import moved, nbytes, recording

SMALL_BYTES = 256 * 1024
"""Up to this many bytes over all pieces, one all-to-all instead of sends.

On idle cores sends are quicker from 64 KiB on, by a tenth of a millisecond. On shared ones, posting them costs the
busy main thread its turn, 2 to 4 ms; an all-to-all is posted by the transport's own thread, which gets one at once.
"""

TAG = 7
"""Apart from the point-to-point messages of pipelines, which use 0."""
_BLOCK = 1 << 16
"""Elements added at a time: the running sum stays in the cache while the parts stream through."""
LOW_PRECISION = (torch.bfloat16, torch.float16)

Combine = Callable[..., Any]
"""``torch.add``, ``torch.maximum`` or ``torch.minimum``: two inputs and ``out=``."""


def is_small(flat: Tensor) -> bool:
    """Whether an exchange of all of ``flat`` goes as one all-to-all."""
    return flat.numel() * flat.element_size() <= SMALL_BYTES


def pieces(flat: Tensor, degree: int) -> list[Tensor]:
    """``degree`` consecutive views of ``flat``: ceil(n / degree) elements each, the last ones shorter or empty."""
    size = -(-flat.numel() // degree)
    if size == 0:
        return [flat] * degree
    parts = list(flat.split(size))  # type: ignore[no-untyped-call]
    return parts + [flat[flat.numel() :]] * (degree - len(parts))


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors start at the same element of one storage (fake tensors have no address to compare)."""
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
    )


def post(group: dist.ProcessGroup, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> list[Any]:
    """Start sending ``sends[r]`` to rank r and receiving ``receives[r]`` from it; own and empty ones are skipped."""
    rank, degree = group.rank(), group.size()
    if (channel := channel_of(group)) is not None:
        return [_shared(channel, sends, receives)]
    works = []
    for distance in range(1, degree):
        peer = (rank - distance) % degree
        if receives[peer].numel():
            works.append(group.recv([receives[peer]], peer, TAG))
    for distance in range(1, degree):
        peer = (rank + distance) % degree
        if sends[peer].numel():
            works.append(group.send([sends[peer]], peer, TAG))
    return works


def _shared(channel: Channel, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Arrival:
    moved(nbytes(send for peer, send in enumerate(sends) if peer != channel.rank))
    return Arrival(channel, sends, receives)


def swap(group: dist.ProcessGroup, arrived: Tensor, sent: Tensor) -> list[Any]:
    """Start an all-to-all of equal pieces: flat ``sent`` to flat ``arrived``, the own piece included."""
    degree = group.size()
    if is_small(sent):
        return _all_to_all(group, arrived, sent)
    sends, receives = pieces(sent, degree), pieces(arrived, degree)
    works = post(group, sends, receives)
    receives[group.rank()].copy_(sends[group.rank()])
    return works


def _all_to_all(group: dist.ProcessGroup, arrived: Tensor, sent: Tensor) -> list[Any]:
    if not sent.numel():
        return []
    if (channel := channel_of(group)) is not None:
        sends, receives = pieces(sent, channel.size), pieces(arrived, channel.size)
        receives[channel.rank].copy_(sends[channel.rank])
        return [_shared(channel, sends, receives)]
    # As bytes: Gloo's all-to-all does not know every dtype.
    work = dist.all_to_all_single(arrived.view(torch.uint8), sent.view(torch.uint8), group=group, async_op=True)
    return [work]


def spread(group: dist.ProcessGroup, gathered: Tensor, mine: Tensor, *, at_once: bool = False) -> list[Any]:
    """Start gathering every rank's flat ``mine`` into flat ``gathered``, in rank order.

    ``at_once``: as one all-to-all whatever the size.
    """
    degree = group.size()
    if (at_once or is_small(gathered)) and channel_of(group) is None:
        return _all_to_all(group, gathered, torch.cat([mine] * degree))
    parts = pieces(gathered, degree)
    works = post(group, [mine] * degree, parts)
    if not same_place(parts[group.rank()], mine):
        parts[group.rank()].copy_(mine)
    return works


def collect(
    group: dist.ProcessGroup, parts: Sequence[Tensor], output: Tensor, combine: Combine
) -> tuple[list[Any], Callable[[], None]]:
    """Start sending ``parts[r]`` to rank r; the works to wait for, and what then combines into ``output``.

    ``output`` may be this rank's own part. The parts may differ in length.
    """
    rank, degree = group.rank(), group.size()
    if (channel := channel_of(group)) is not None and not recording():
        number = channel.send(parts)

        def combine_in_place() -> None:
            messages = [
                parts[rank] if peer == rank else channel.message(number, peer, parts[rank].dtype)
                for peer in range(degree)
            ]
            combine_in_rank_order(output, messages, rank, combine)
            channel.release(number)

        return [Coming(channel, number)], combine_in_place
    scratch = parts[rank].new_empty((degree - 1, parts[rank].numel()))
    arrived = [parts[rank] if peer == rank else scratch[peer - (peer > rank)] for peer in range(degree)]
    return post(group, parts, arrived), lambda: combine_in_rank_order(output, arrived, rank, combine)


def combine_in_rank_order(output: Tensor, parts: Sequence[Tensor], own: int, combine: Combine = torch.add) -> None:
    """``output`` = ((parts[0] + parts[1]) + parts[2]) + ...; 16-bit sums are taken in float32 and rounded once.

    Args:
        output: flat; may be ``parts[own]`` itself, and of a wider dtype than the parts.
        parts: flat; all but ``parts[own]`` may be overwritten.
        own: which part must stay as it is; -1: none.
        combine: what stands for +.
    """
    if len(parts) == 1:
        if not same_place(output, parts[0]):
            output.copy_(parts[0])
        return
    wide = output.dtype != parts[0].dtype or (output.dtype in LOW_PRECISION and combine is torch.add)
    if len(parts) == 2 and output.dtype == parts[0].dtype:
        combine(parts[0], parts[1], out=output)
        return
    for start in starts(output, output.numel(), _BLOCK):
        target = output[start : start + _BLOCK]
        blocks = [part[start : start + _BLOCK] for part in parts]
        if wide:
            _chain_in_float32(target, blocks, combine)
        else:
            _chain(target, blocks, own, combine)


def starts(tensor: Tensor, size: int, step: int) -> range:
    """Where to begin each ``step`` of ``size``; of a fake tensor two suffice, since further ones would only repeat."""
    return range(0, min(size, 2 * step) if isinstance(tensor, FakeTensor) else size, step)


def _chain(target: Tensor, blocks: Sequence[Tensor], own: int, combine: Combine) -> None:
    # The running value lives in a received part: the target may be the own part, which is still to be read.
    total = blocks[1] if own == 0 else blocks[0]
    combine(blocks[0], blocks[1], out=total)
    for block in blocks[2:-1]:
        combine(total, block, out=total)
    combine(total, blocks[-1], out=target)


def _chain_in_float32(target: Tensor, blocks: Sequence[Tensor], combine: Combine) -> None:
    total = blocks[0].to(torch.promote_types(torch.float32, target.dtype))
    for block in blocks[1:]:
        combine(total, block, out=total)
    target.copy_(total)
