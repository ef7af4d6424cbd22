"""Flat buckets: gradients gathered in large buffers that are reduced while the backward pass still runs.

Parameters are packed in reverse order, the order in which their gradients come, into buckets of about
25 MiB of gradients (Li et al., "PyTorch Distributed", VLDB 2020). A bucket is three flat buffers over
the same elements:

    element      0 ......................................... size (a multiple of dp)
    working      | layer 7 mlp.down | layer 7 mlp.gate_up | ... |pad|   what forward reads; parameters are views
    gradient     | the same, float32 for 16-bit training            |   what hooks fill and the reduction sums
    chunk        |<--- shard 0 --->|<--- shard 1 --->|                  what this rank updates
    piece        |<- r0 ->|<- r1 ->|<- r0 ->|<- r1 ->|                  what this rank alone sums (and counts)

Rank ``(r, s)`` of ``copies x shards`` dp ranks updates chunk ``s`` and sums piece ``r`` of it:

    replicated       1 shard, dp copies      sum my piece over dp, gather the pieces of all        2 (dp-1)/dp n
    ZeRO-1           dp shards, 1 copy       sum my chunk over dp                                    (dp-1)/dp n
    with replicas    both                    sum chunks inside the shard group, then the replicated way across

``n`` is the bucket's gradient bytes and the last column what each rank sends. A hook copies (first
micro-batch) or adds every gradient into its place and drops it. In the last micro-batch a full bucket
starts its reduction at once; buckets start in one fixed order, so that ranks agree on the order of
messages whatever order their gradients come in.

Deterministic mode sums the micro-batches of the *global* batch in one chain, ``((g0 + g1) + g2) + ...``
with micro-batch ``j`` on dp rank ``j % dp``: every micro-step's buckets are exchanged, and the owner of a
piece adds what the dp ranks sent, in rank order, to its accumulator. The bits then do not depend on dp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from meshwright.comm.collectives import all_gather, all_to_all
from meshwright.comm.copies import Copies
from meshwright.comm.operations import Operations, started
from meshwright.parallel.owned import Owned

DEFAULT_BUCKET_BYTES = 25 * 2**20

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what gradients are summed and masters kept: float32 for 16-bit training, otherwise the same."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


@dataclass(frozen=True)
class Slot:
    """Where one parameter stands in its bucket."""

    name: str
    """Physical name with its stage: ``stage0:layers.7.mlp.down.weight``."""
    parameter: nn.Parameter
    start: int
    count: int


def pack(
    parameters: Iterable[tuple[str, nn.Parameter]], limit: int, alone: frozenset[str]
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Consecutive parameters in groups of at most ``limit`` elements (or one parameter); those in ``alone`` alone."""
    group: list[tuple[str, nn.Parameter]] = []
    filled = 0
    for name, parameter in parameters:
        if name in alone:
            yield [(name, parameter)]
            continue
        if group and filled + parameter.numel() > limit:
            yield group
            group, filled = [], 0
        group.append((name, parameter))
        filled += parameter.numel()
    if group:
        yield group


class Bucket:
    """Consecutive parameters as flat buffers, and the sum of their gradients over the dp ranks.

    Taking over the parameters makes each a view of ``working``; their values stay.
    """

    def __init__(
        self, parameters: list[tuple[str, nn.Parameter]], copies: Copies, dtype: torch.dtype, *, every_step: bool
    ) -> None:
        self.copies = copies
        device, sum_dtype = parameters[0][1].device, accumulation_dtype(dtype)
        self.slots, filled = [], 0
        for name, parameter in parameters:
            self.slots.append(Slot(name, parameter, filled, parameter.numel()))
            filled += parameter.numel()
        self.name = self.slots[0].name
        """The first parameter in it: what a reducer knows the bucket by."""
        self.size = -(-filled // copies.degree) * copies.degree
        self.chunk_start, self.chunk_stop = copies.chunk(self.size)
        self.piece_start, self.piece_stop = copies.piece(self.size)
        self.working = torch.zeros(self.size, dtype=dtype, device=device)
        self.gradient = torch.zeros(self.size, dtype=sum_dtype, device=device)
        self.master = self._take_over(sum_dtype)
        self.places = [
            self.gradient[slot.start : slot.start + slot.count].view(slot.parameter.shape) for slot in self.slots
        ]
        self.filled = [False] * len(self.slots)
        """Whether a slot of the gradient buffer holds anything of this step (of this micro-step: ``every_step``)."""
        self.ready: float | None = None
        """When, in a timed step, its last gradient came."""
        self.missing: set[int] = set()
        """Slots whose gradient of this micro-step has not come yet."""
        self._accumulator = self.gradient.new_zeros(self.size // copies.degree) if every_step else None
        self._accumulated = False

    def _take_over(self, master_dtype: torch.dtype) -> Tensor:
        """Move the parameters' values in; the masters of my chunk (the working values themselves where they can be)."""
        chunk = slice(self.chunk_start, self.chunk_stop)
        master = self.working[chunk]
        with torch.no_grad():
            if master_dtype is not self.working.dtype:
                whole = torch.zeros(self.size, dtype=master_dtype, device=self.working.device)
                for slot in self.slots:
                    whole[slot.start : slot.start + slot.count] = slot.parameter.detach().view(-1)
                master = whole if self.copies.shards == 1 else whole[chunk].clone()
                self.working.copy_(whole)
            for slot in self.slots:
                place = self.working[slot.start : slot.start + slot.count].view(slot.parameter.shape)
                if master_dtype is self.working.dtype:
                    place.copy_(slot.parameter.detach())
                slot.parameter.data = place
        return master

    def take(self, index: int, gradient: Tensor) -> None:
        """Put a gradient into its slot: the first copies, later ones add."""
        if self.filled[index]:
            self.places[index].add_(gradient)
        else:
            self.places[index].copy_(gradient)
            self.filled[index] = True
        self.missing.discard(index)

    def fill_up(self) -> None:
        """Parameters without a gradient count as zero."""
        for index, filled in enumerate(self.filled):
            if not filled:
                self.places[index].zero_()
                self.filled[index] = True

    def forget(self) -> None:
        """The next gradient of each parameter is its first."""
        self.filled = [False] * len(self.slots)
        self.expect_all()

    def expect_all(self) -> None:
        """Start a micro-step: every parameter's gradient is to come."""
        self.missing = set(range(len(self.slots)))

    def forget_sums(self) -> None:
        """Deterministic mode: the next exchange is the first of its step."""
        self._accumulated = False

    def exchange(self) -> Operations:
        """Deterministic mode, after each micro-step: add my piece of every dp rank's gradients to my accumulator."""
        assert self._accumulator is not None
        outgoing = self.gradient
        if self.copies.shards > 1 and self.copies.copies > 1:
            # Piece order is (shard, copy), dp rank order (copy, shard).
            outgoing = outgoing.view(self.copies.shards, self.copies.copies, -1).transpose(0, 1).contiguous().view(-1)
        incoming = torch.empty_like(outgoing)
        yield started(all_to_all(incoming, outgoing, self.copies.dp, asynchronous=True))
        add_chain(self._accumulator, incoming.view(self.copies.degree, -1), fresh=not self._accumulated)
        self._accumulated = True

    def gather_pieces(self) -> Operations:
        """Deterministic mode, at the end of a step: the accumulated pieces become this rank's chunk."""
        assert self._accumulator is not None
        piece = self.gradient[self.piece_start : self.piece_stop]
        piece.copy_(self._accumulator)
        if self.copies.copy is not None:
            chunk = self.gradient[self.chunk_start : self.chunk_stop]
            yield started(all_gather(chunk, piece, self.copies.copy, asynchronous=True))

    def publish(self) -> Operations:
        """Masters to working parameters on every rank."""
        chunk = self.working[self.chunk_start : self.chunk_stop]
        if self.master.dtype is not chunk.dtype:
            chunk.copy_(self.master)
        if self.copies.shard is not None:
            yield started(all_gather(self.working, chunk, self.copies.shard, asynchronous=True))

    def gradient_buffers(self) -> list[Tensor]:
        """The gradient buffer and, in deterministic mode, the accumulator."""
        return [self.gradient] if self._accumulator is None else [self.gradient, self._accumulator]

    def owned(self, counts: Callable[[str], bool], tp_replicated: Callable[[str], bool]) -> Iterator[Owned]:
        """The ranges of my chunk, cut where my piece starts and stops so that each is counted on one dp rank."""
        cuts = (self.chunk_start, self.piece_start, self.piece_stop, self.chunk_stop)
        for slot in self.slots:
            for low, high in pairwise(cuts):
                start, stop = max(low, slot.start), min(high, slot.start + slot.count)
                if start < stop:
                    yield Owned(
                        parameter=slot.name,
                        start=start - slot.start,
                        master=self.master[start - self.chunk_start : stop - self.chunk_start],
                        gradient=self.gradient[start:stop],
                        decay=slot.parameter.dim() > 1,
                        counted=low == self.piece_start and counts(slot.name),
                        tp_replicated=tp_replicated(slot.name),
                    )


def add_chain(accumulator: Tensor, contributions: Tensor, *, fresh: bool) -> None:
    """``accumulator = ((accumulator + contributions[0]) + contributions[1]) + ...``; from nothing if ``fresh``."""
    first, *rest = contributions.unbind()
    if not fresh:
        accumulator.add_(first)
    elif rest:
        torch.add(first, rest.pop(0), out=accumulator)
    else:
        accumulator.copy_(first)
    for contribution in rest:
        accumulator.add_(contribution)
