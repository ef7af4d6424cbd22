"""Ledgers held against each other: the same quantity from two sources, the difference, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshwright.ledger.ledger import Ledger, RankLedger, Source


@dataclass(frozen=True)
class Tolerances:
    """The largest relative difference allowed; None: shown, not judged."""

    state: float | None = 0.0
    """Parameters, gradients, optimizer state."""
    activations: float | None = 0.02
    """On several devices; on one they must be equal."""
    temporary: float | None = None
    peak: float | None = None
    computes: float | None = 0.0
    payload: float | None = 0.0
    messages: float | None = 0.0
    wire: float | None = None
    spends: float | None = None


@dataclass(frozen=True)
class Difference:
    """One quantity of one rank, side by side."""

    rank: int
    quantity: str
    values: dict[Source, float]
    """By source, those that have it."""
    allowed: float | None
    relative: float = field(init=False)
    """Spread of the values over the largest of them; 0 if all are equal."""

    def __post_init__(self) -> None:
        high, low = max(self.values.values()), min(self.values.values())
        largest = max(abs(high), abs(low))
        object.__setattr__(self, "relative", (high - low) / largest if largest else 0.0)

    @property
    def agrees(self) -> bool:
        """Whether the difference is allowed."""
        return self.allowed is None or self.relative <= self.allowed


def compare(ledgers: Sequence[Ledger], tolerances: Tolerances | None = None) -> list[Difference]:
    """Every quantity of every rank that at least two of the ``ledgers`` have, rank by rank.

    A kind of traffic that one ledger has and another lacks counts as 0 there. ``spends`` are compared
    only where two ledgers have them.
    """
    tolerances = tolerances or Tolerances()
    shared = sorted({entry.rank for ledger in ledgers for entry in ledger.ranks})
    result: list[Difference] = []
    for rank in shared:
        entries = {ledger.source: entry for ledger in ledgers for entry in ledger.ranks if entry.rank == rank}
        if len(entries) > 1:
            result.extend(_of_rank(rank, entries, tolerances, alone=ledgers[0].world == 1))
    return result


def _of_rank(
    rank: int, entries: dict[Source, RankLedger], tolerances: Tolerances, *, alone: bool
) -> Iterator[Difference]:
    state, activations = tolerances.state, tolerances.activations
    allowed = {
        "parameters": state,
        "gradients": state,
        "optimizer": state,
        "activations": 0.0 if alone and activations is not None else activations,
        "temporary": tolerances.temporary,
        "peak": tolerances.peak,
    }
    for name, limit in allowed.items():
        yield Difference(rank, f"stores: {name}", _values(entries, "stores", name), limit)
    for name in ("forward", "backward", "recompute"):
        yield Difference(rank, f"computes: {name}", _values(entries, "computes", name), tolerances.computes)
    by_key = {source: {send.key: send for send in entry.sends} for source, entry in entries.items()}
    for key in sorted({key for sends in by_key.values() for key in sends}):
        for name, limit in (
            ("payload", tolerances.payload),
            ("wire", tolerances.wire),
            ("messages", tolerances.messages),
        ):
            values = {source: float(getattr(sends.get(key), name, 0)) for source, sends in by_key.items()}
            yield Difference(rank, f"sends: {' '.join(key)}: {name}", values, limit)
    yield from _spends(rank, entries, tolerances)


def _values(entries: dict[Source, RankLedger], part: str, name: str) -> dict[Source, float]:
    return {source: float(getattr(getattr(entry, part), name)) for source, entry in entries.items()}


def _spends(rank: int, entries: dict[Source, RankLedger], tolerances: Tolerances) -> Iterator[Difference]:
    timed = {source: entry.spends for source, entry in entries.items() if entry.spends is not None}
    if len(timed) < 2:
        return
    parts = {source: dict(spends.parts()) for source, spends in timed.items()}
    for name in dict.fromkeys(name for part in parts.values() for name in part):
        values = {source: part.get(name, 0.0) for source, part in parts.items()}
        yield Difference(rank, f"spends: {name}", values, tolerances.spends)
    walls = {source: spends.wall for source, spends in timed.items()}
    yield Difference(rank, "spends: wall", walls, tolerances.spends)
