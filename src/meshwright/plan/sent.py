"""Messages of one origin, as the predicted ledger counts them."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.plan.wire import Wired


@dataclass(frozen=True)
class Sent:
    """Messages of one origin: ``messages`` of them with these bytes together."""

    axis: str
    operation: str
    phase: str
    payload: int
    wired: Wired
    messages: int
    formula: str
    """How the payload comes about, with its numbers."""
