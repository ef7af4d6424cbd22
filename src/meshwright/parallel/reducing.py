"""How one buffer of gradients becomes the sum over the dp ranks: what buckets and FSDP2 groups ask of a reducer.

The default is the plain sum by the collectives of ``comm``. Others (an algorithm of the job's choice, compression)
come from ``train.synchronise``, which alone knows what the job asks for.

    replicated, ZeRO-1   a bucket once a step:              ``reduce``
    ZeRO-2, 3            an FSDP2 group every micro-batch:  ``scatter``; and once a step, across copies: ``across``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from meshwright.comm.collectives import reduce_scatter
from meshwright.comm.copies import Copies, Span
from meshwright.comm.operations import Operations, shards_then_copies, started, sum_in_place


class Reducer(Protocol):
    """Sums buffers of gradients over the dp ranks; may remember something of each from step to step.

    Every method that returns ``Operations`` starts its operations and yields each handle that must end before it can
    go on. All ranks call it for the same buffers in the same order. ``name`` is the buffer's, the same in every step.
    """

    def prepare(self, name: str, size: int, spans: Sequence[Span], copies: Copies) -> None:
        """Hear of a buffer of ``size`` elements before its first use.

        Args:
            name: of the buffer.
            size: elements, padding included; of an FSDP2 group all rows ``[shards, row]`` together.
            spans: the parameters in it; of an FSDP2 group each shard's rows of each parameter.
            copies: how the dp ranks divide it.
        """

    def reduce(self, name: str, gradient: Tensor, copies: Copies) -> Operations:
        """Sum ``gradient`` in place, so that this rank's chunk of it (``copies.chunk``) is right.

        Args:
            name: of the buffer.
            gradient: ``[size]``; what is outside this rank's chunk may be overwritten.
            copies: how the dp ranks divide it.
        """

    def scatter(self, name: str, output: Tensor, contributions: Tensor, copies: Copies) -> Operations:
        """Sum ``contributions`` over the shard ranks: row ``s`` of the sum is shard ``s``'s ``output``.

        Args:
            name: of the buffer.
            output: ``[row]``.
            contributions: ``[shards * row]``; may be overwritten.
            copies: with shards.
        """

    def across(self, name: str, chunk: Tensor, copies: Copies) -> Operations:
        """Sum ``chunk`` (``[row]``, of a multiple of the copies) in place over the copies of this shard."""

    def state(self) -> dict[str, Tensor]:
        """What it remembers from step to step, by the name of the buffer and what it is; empty for a plain sum."""


@runtime_checkable
class WaitingReducer(Protocol):
    """A reducer that must see all of a rank's gradients before any of them is sent."""

    def ready(self, gradients: Sequence[Tensor]) -> None:
        """All buffers of a step are full."""


class DirectReducer:
    """The plain sum: reduce-scatter among the shards, reduce-scatter and all-gather among the copies."""

    def prepare(self, name: str, size: int, spans: Sequence[Span], copies: Copies) -> None:
        """See ``Reducer.prepare``."""

    def reduce(self, name: str, gradient: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.reduce``."""
        return shards_then_copies(self, name, gradient, copies)

    def scatter(self, name: str, output: Tensor, contributions: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.scatter``."""
        assert copies.shard is not None
        yield started(reduce_scatter(output, contributions, copies.shard, asynchronous=True))

    def across(self, name: str, chunk: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.across``."""
        if copies.copy is not None:
            yield from sum_in_place(chunk, copies.copy)

    def state(self) -> dict[str, Tensor]:
        """See ``Reducer.state``."""
        return {}
