"""Ordered: every element is summed in one place in the order of the ranks, ``((x0 + x1) + x2) + ...``.

    1 round      piece r to rank r, which adds what came in rank order
    1 round      the whole piece to everybody

The bits depend on nothing but the ranks' numbers: not on the transport, the length, or who comes first. As few bytes as
the ring, ``2 (P-1)/P n``, in ``2 (P-1)`` messages, all of a round at once.
"""

from __future__ import annotations

from meshwright.sync.schedule import Round, cut, messages


class Ordered:
    """See the module."""

    def all_reduce(self, rank: int, ranks: int, elements: int) -> list[Round]:
        """See ``Schedule.all_reduce``."""
        pieces = [cut(elements, ranks, index) for index in range(ranks)]
        others = [(rank + distance) % ranks for distance in range(1, ranks)]
        spread = messages((peer, [pieces[peer]]) for peer in others)
        mine = messages((peer, [pieces[rank]]) for peer in others)
        return [Round(spread, mine, adds=True), Round(mine, spread)]

    def reduce_scatter(self, rank: int, ranks: int, row: int) -> list[Round]:
        """See ``Schedule.reduce_scatter``."""
        return self.all_reduce(rank, ranks, ranks * row)[:1]
