"""One update of the parameters on its way to the shards, and where it is told of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

from torch import Tensor

from meshwright.sync.server.cursor import Position
from meshwright.sync.server.modes import Work
from meshwright.sync.server.replica import Key


@dataclass
class Update:
    """One update on its way to the shards.

    Attributes:
        number: from 1 at the run's very start.
        entries: pushes, in the order they are added.
        forget: pushes that come to nothing.
        facts: what the workers said of each entry.
    """

    number: int
    entries: list[Key]
    works: tuple[Work, ...]
    facts: list[dict[str, Any]]
    forget: list[Key] = field(default_factory=list)
    peaks: dict[int, float] = field(default_factory=dict)
    squares: dict[int, tuple[float, float]] = field(default_factory=dict)
    norm: float = math.nan
    rate: float = 0.0
    factor: float | None = None

    @property
    def valid(self) -> int:
        """Valid tokens of all entries."""
        return sum(int(fact["valid"]) for fact in self.facts)

    @property
    def loss(self) -> float:
        """The sum over micro-batches, in the order of the global batch (the first of every slot, the second, ...)."""
        columns = zip_longest(*(fact["losses"] for fact in self.facts), fillvalue=0.0)
        return float(sum(float(loss) for column in columns for loss in column))

    @property
    def staleness(self) -> list[int]:
        """Of each entry: updates between what its worker read and this one."""
        return [self.number - 1 - int(fact["version"]) for fact in self.facts]


class Sink(Protocol):
    """Where the coordinator's results go; called with nothing else going on."""

    def event(self, kind: str, **facts: Any) -> None:
        """Something a person wants to know."""

    def update(self, update: Update, loss: float) -> None:
        """An update was decided; ``loss`` in nats per valid token."""

    def evaluated(self, step: int, loss: float | None) -> None:
        """Validation after a step."""

    def save(self, step: int, shards: Sequence[Sequence[Tensor]], updates: int, position: Position) -> None:
        """The state after a step, by shard."""

    def ended(self, why: str | None) -> None:
        """Everything is done; ``why``: or stopped early."""
