"""Where one element goes in a schedule: which messages carry it, and whose contributions are in it by then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.sync.schedule import Round


@dataclass(frozen=True)
class Hop:
    """One message that carries the element."""

    round: int
    source: int
    target: int
    carried: frozenset[int]
    """Whose contributions it carries."""
    after: frozenset[int]
    """Whose contributions the target has then."""
    elements: int
    """Of the whole message."""


def follow(
    rounds: Sequence[Sequence[Round]], element: int, start: Sequence[frozenset[int]]
) -> tuple[list[Hop], list[frozenset[int]]]:
    """The hops of ``element``, and what every rank holds of it at the end.

    Args:
        rounds: by rank.
        element: its index.
        start: by rank, whose contributions its value is the sum of.

    Raises:
        ValueError: a contribution would be added twice: the schedule is wrong.
    """
    held, hops = list(start), []
    for number in range(len(rounds[0])):
        before = list(held)
        for source, mine in enumerate(rounds):
            for message in mine[number].sends:
                if not any(first <= element < last for first, last in message.ranges):
                    continue
                target, carried = message.peer, before[source]
                if mine[number].adds:
                    if held[target] & carried:
                        raise ValueError(f"round {number}: {sorted(held[target] & carried)} would be added twice")
                    held[target] = held[target] | carried
                else:
                    held[target] = carried
                hops.append(Hop(number, source, target, carried, held[target], message.elements))
    return hops, held
