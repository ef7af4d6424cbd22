"""The Ledger: what every rank stores, computes, sends and spends in one training step.

One type, three sources: ``predicted`` (closed forms), ``traced`` (the real program on fake tensors) and
``measured`` (a real run). The sources never share code; they are held against each other (``compare``).

Conventions, the same in every source:

* **stores**, bytes. Parameters: all copies used in forward and backward, and float32 masters; gradients:
  the accumulation buffers; optimizer: moments. Activations: what forward leaves alive for backward
  (recomputed ones included while they live). Temporary: everything else, collective buffers included.
* **computes**, FLOPs. A matrix product ``[m, k] x [k, n]`` is ``2 m n k``. Attention is counted as causal
  whatever kernel runs: forward ``4 b h d pairs`` with ``pairs = s^2 / 2``, with a window ``w < s``
  ``s w - w^2 / 2``; backward twice that. *Model* FLOPs = forward + backward. *Hardware* FLOPs add
  ``recompute``: forward work done again, and half a forward for each attention backward (flash kernels
  build the scores anew: 2.5 instead of 2).
* **sends**, by mesh axis, operation and phase. *Payload*: bytes this rank hands to the operation; *wire*:
  bytes this rank puts on its link by the operation's algorithm; *messages*: how often it was called.
  What a receive takes in is its sender's.
* **spends**, seconds of one step; the parts sum to ``wall``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.errors import InputError

Source = Literal["predicted", "traced", "measured"]
Category = Literal["parameters", "gradients", "optimizer", "activations", "temporary"]
CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "temporary")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Stores(_Part):
    """Bytes one rank holds. ``activations`` and ``temporary`` are each one's own highest value in the step."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    peak: int = 0
    """The most held at one moment."""
    at_peak: dict[Category, int] = {}
    """What ``peak`` is made of; sums to it."""
    allocator_peak: int | None = None
    """The device allocator's own highest value, where it keeps one (CUDA)."""

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state: what does not come and go within a step."""
        return self.parameters + self.gradients + self.optimizer


class Computes(_Part):
    """FLOPs of one rank and step, by the conventions of this module."""

    forward: int = 0
    backward: int = 0
    recompute: int = 0

    @property
    def model(self) -> int:
        """Model FLOPs: what the mathematics needs."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """Hardware FLOPs: with everything computed again."""
        return self.model + self.recompute


class Send(_Part):
    """One kind of traffic of one rank and step."""

    axis: str
    operation: str
    phase: str
    payload: int
    wire: int
    messages: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the kind: axis, operation, phase."""
        return (self.axis, self.operation, self.phase)


class BucketTimes(_Part):
    """One sum of a bucket of gradients (ZeRO-2, 3: of a layer's) in a timed step: seconds since the step began."""

    name: str
    """The first parameter in it."""
    bytes: int
    """Of its gradients."""
    ready: float
    """Its last gradient came."""
    start: float
    """Its first message left: buckets start in one order, so one may wait for the one before it."""
    end: float
    """Its sum was there, and noticed."""
    exposed: float
    """How long the training thread waited for messages and added them, instead of computing."""


class Spends(_Part):
    """Seconds of one rank's step; ``data`` to ``other`` sum to ``wall``."""

    wall: float
    data: float = 0.0
    compute: dict[str, float] = {}
    """By phase: forward, backward, optimizer and so on."""
    communication: dict[str, float] = {}
    """Exposed transfer (nothing computed meanwhile), by mesh axis."""
    waiting: float = 0.0
    """In collectives, for the slowest rank of the group."""
    bubble: float = 0.0
    """In the pipeline, for a neighbour's result."""
    checkpoint: float = 0.0
    other: float = 0.0
    buckets: tuple[BucketTimes, ...] = ()
    """Measured on CPU: each sum of gradients, in the order in which they ended; their exposed time is in the parts."""

    def parts(self) -> Iterator[tuple[str, float]]:
        """The parts by name, in the order of the tables."""
        yield "data", self.data
        for phase, seconds in self.compute.items():
            yield f"compute: {phase}", seconds
        for axis, seconds in self.communication.items():
            yield f"communication: {axis}", seconds
        yield "waiting for the slowest", self.waiting
        yield "bubble", self.bubble
        yield "checkpoint", self.checkpoint
        yield "other", self.other

    @property
    def sum(self) -> float:
        """The parts together; within 2 % of ``wall``."""
        return sum(seconds for _, seconds in self.parts())


class RankLedger(_Part):
    """One rank's entry."""

    rank: int
    place: dict[str, int] = {}
    """Its coordinates by mesh axis."""
    stores: Stores = Stores()
    computes: Computes = Computes()
    sends: tuple[Send, ...] = ()
    """Traffic of a steady step. Nothing else is sent: the first step has no shape exchange."""
    spends: Spends | None = None

    def payload(self, axis: str | None = None) -> int:
        """Payload bytes of a step, of one axis or of all."""
        return sum(send.payload for send in self.sends if axis in (None, send.axis))

    def wire(self, axis: str | None = None) -> int:
        """Wire bytes of a step, of one axis or of all."""
        return sum(send.wire for send in self.sends if axis in (None, send.axis))


class Ledger(_Part):
    """The entries of the ranks of one layout, from one source. Not every rank need be there."""

    source: Source
    layout: str
    world: int
    """Ranks of the layout."""
    step: int | None = None
    """The step that was measured (from 1)."""
    backend: str | None = None
    """Whose algorithms ``wire`` is of: ``gloo`` or ``nccl``."""
    ranks: tuple[RankLedger, ...]
    tokens_per_second: float | None = None
    """Valid tokens kept per second by all ranks."""
    useful_speedup: float | None = None
    """``tokens_per_second`` over one device's."""
    efficiency: float | None = None
    """``useful_speedup`` over the number of ranks."""

    @property
    def fullest(self) -> RankLedger:
        """The rank that holds most at its peak."""
        return max(self.ranks, key=lambda entry: entry.stores.peak)

    def rank(self, rank: int) -> RankLedger:
        """The entry of one rank.

        Raises:
            InputError: the ledger has none.
        """
        for entry in self.ranks:
            if entry.rank == rank:
                return entry
        known = ", ".join(str(entry.rank) for entry in self.ranks[:16])
        raise InputError(f"rank: {rank} is not in this {self.source} ledger; it has {known}")

    def with_rates(self, tokens_per_second: float | None, one_device: float | None) -> Ledger:
        """The same ledger with its speed, and, where one device's is known, what the ranks are worth."""
        speedup = tokens_per_second / one_device if tokens_per_second and one_device else None
        efficiency = speedup / self.world if speedup else None
        return self.model_copy(
            update={"tokens_per_second": tokens_per_second, "useful_speedup": speedup, "efficiency": efficiency}
        )

    def to_json(self) -> str:
        """The ledger as it stands in ``ledger.json``."""
        return self.model_dump_json(indent=1, exclude_none=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "ledger.json") -> Ledger:
        """Read what ``to_json`` wrote.

        Raises:
            InputError: it is not such a text; the message says where it went wrong.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "the text"
            raise InputError(f"{where}: {place}: {first['msg']}; expected a ledger written by meshwright") from error
