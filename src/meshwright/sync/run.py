"""Carries out a schedule on tensors: sends, receives, additions in rank order; chunks under way side by side.

A long all-reduce is cut into chunks, each a schedule of its own. While the messages of one travel, another is added:

    chunk 0   | round 0 | add | round 1 | add | round 2 ...
    chunk 1        | round 0 | add | round 1 | add | ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import Handle
from meshwright.comm.exchange import Combine, combine_in_rank_order, same_place
from meshwright.comm.messages import exchange, exchange_to_read
from meshwright.comm.operations import Operations
from meshwright.comm.traffic import Key, nbytes, operation, resumed
from meshwright.sync.schedule import Message, Range, Round, Schedule, cut

DEFAULT_CHUNK_BYTES = 4 * 2**20
UNDER_WAY = 2
"""Chunks whose messages travel at the same time."""

COMBINES: dict[str, Combine] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
"""NaN wins the last two."""


class Scheduled:
    """An all-reduce algorithm given as a schedule.

    Args:
        schedule: the rounds.
        chunk_bytes: longer all-reduces are cut into chunks of at most so many bytes.
    """

    def __init__(self, schedule: Schedule, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self.schedule, self._chunk_bytes = schedule, chunk_bytes

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Operations:
        """See ``all_reduce.Algorithm.all_reduce``."""
        flat, ranks = tensor.detach().view(-1), group.size()
        if ranks == 1 or not flat.numel():
            return
        with operation(group, "all_reduce", nbytes([flat])) as key:
            pass
        ranges = [cut(flat.numel(), count, index) for count in [self.chunks(flat)] for index in range(count)]
        yield from side_by_side(
            _carry_out(
                self.schedule.all_reduce(group.rank(), ranks, stop - start), flat[start:stop], group, COMBINES[op],
                "all_reduce", key,
            )
            for start, stop in ranges
        )  # fmt: skip

    def chunks(self, flat: Tensor) -> int:
        """Into how many an all-reduce of ``flat`` is cut."""
        return -(-nbytes([flat]) // self._chunk_bytes)

    def reduce_scatter(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> Operations:
        """See ``all_reduce.Algorithm.reduce_scatter``."""
        flat, ranks, rank, row = input.detach().view(-1), group.size(), group.rank(), output.numel()
        mine = flat[rank * row : (rank + 1) * row]
        if ranks > 1 and row:
            with operation(group, "reduce_scatter", nbytes([flat])) as key:
                pass
            rounds = self.schedule.reduce_scatter(rank, ranks, row)
            yield from _carry_out(rounds, flat, group, torch.add, "reduce_scatter", key)
        if not same_place(output, mine):
            output.view(-1).copy_(mine)


def side_by_side(sequences: Iterable[Operations], under_way: int = UNDER_WAY) -> Operations:
    """Several sequences of operations as one, ``under_way`` of them at a time, in an order that all ranks share.

    All must have as many operations on every rank.
    """
    waiting = iter(sequences)
    active: deque[tuple[Operations, Handle]] = deque()
    _begin(waiting, active, under_way)
    while active:
        steps, handle = active.popleft()
        yield handle
        following = next(steps, None)
        if following is not None:
            active.append((steps, following))
        _begin(waiting, active, under_way)


def _begin(waiting: Iterator[Operations], active: deque[tuple[Operations, Handle]], under_way: int) -> None:
    while len(active) < under_way and (steps := next(waiting, None)) is not None:
        if (handle := next(steps, None)) is not None:
            active.append((steps, handle))


def _carry_out(
    rounds: Sequence[Round], flat: Tensor, group: dist.ProcessGroup, combine: Combine, name: str, key: Key | None
) -> Operations:
    for one in rounds:
        with resumed(key):
            handle = _start(one, flat, group, combine, name)
        yield handle


def _start(one: Round, flat: Tensor, group: dist.ProcessGroup, combine: Combine, name: str) -> Handle:
    outgoing = {message.peer: _taken(flat, message.ranges) for message in one.sends}
    if one.adds:
        elements = {message.peer: message.elements for message in one.receives}
        work, arrived, done = exchange_to_read(group, outgoing, elements, flat)

        def add() -> None:
            _combine(flat, one.receives, arrived(), group.rank(), combine)
            done()

        return Handle(group, name, [work], add)
    if all(len(message.ranges) == 1 for message in one.receives):
        places = {message.peer: flat[slice(*message.ranges[0])] for message in one.receives}
        return Handle(group, name, [exchange(group, outgoing, places)])
    places = {message.peer: flat.new_empty(message.elements) for message in one.receives}
    work = exchange(group, outgoing, places)
    return Handle(group, name, [work], partial(_put, flat, one.receives, places))


def _taken(flat: Tensor, ranges: Sequence[Range]) -> Tensor:
    parts = [flat[start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _split(message: Message, arrived: Tensor) -> Iterator[tuple[Range, Tensor]]:
    position = 0
    for start, stop in message.ranges:
        yield (start, stop), arrived[position : position + stop - start]
        position += stop - start


def _put(flat: Tensor, receives: Sequence[Message], arrived: dict[int, Tensor]) -> None:
    for message in receives:
        for (start, stop), part in _split(message, arrived[message.peer]):
            flat[start:stop].copy_(part)


def _combine(
    flat: Tensor, receives: Sequence[Message], arrived: dict[int, Tensor], rank: int, combine: Combine
) -> None:
    """Combine what came with what is there, range by range, in the order of the ranks."""
    by_range: dict[Range, dict[int, Tensor]] = {}
    for message in receives:
        for where, part in _split(message, arrived[message.peer]):
            by_range.setdefault(where, {})[message.peer] = part
    for (start, stop), parts in by_range.items():
        target = flat[start:stop]
        parts[rank] = target
        order = sorted(parts)
        combine_in_rank_order(target, [parts[peer] for peer in order], order.index(rank), combine)
