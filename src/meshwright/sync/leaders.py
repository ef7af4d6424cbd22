"""Leaders: every node sums on its first rank, the leaders exchange, and each gives the result to its node.

    node A   0 <- 1, 2      leader 0 <-> leader 3      0 -> 1, 2
    node B   3 <- 4, 5                                 3 -> 4, 5

Across nodes it is as cheap as the hierarchical form, with one connection a node; inside, the leader receives and
sends all n elements of every other rank, so it is for nodes of few ranks, or ranks that may not all reach each other.
"""

from __future__ import annotations

from meshwright.sync.ring import ring_rounds
from meshwright.sync.schedule import Range, Round, TwoLevels, cut, messages


class Leaders(TwoLevels):
    """See the module."""

    def all_reduce(self, rank: int, ranks: int, elements: int) -> list[Round]:
        """See ``Schedule.all_reduce``."""
        node, count = self._node[rank], len(self._members)
        leader, *others = self._members[node]
        whole = [(0, elements)]
        if rank != leader:
            between = [Round(adds=step < count - 1) for step in range(2 * (count - 1))]
            return [
                Round(messages([(leader, whole)]), adds=True),
                *between,
                Round(receives=messages([(leader, whole)])),
            ]
        pieces = [cut(elements, count, index) for index in range(count)]
        return [
            Round(receives=messages((peer, whole) for peer in others), adds=True),
            *ring_rounds(node, [members[0] for members in self._members], pieces),
            Round(messages((peer, whole) for peer in others)),
        ]

    def reduce_scatter(self, rank: int, ranks: int, row: int) -> list[Round]:
        """See ``Schedule.reduce_scatter``: leaders send each other the rows of their nodes, then hand them out."""
        node = self._node[rank]
        leader, *others = here = self._members[node]

        def rows(owners: list[int]) -> list[Range]:
            return [(owner * row, (owner + 1) * row) for owner in owners]

        whole = [(0, ranks * row)]
        if rank != leader:
            return [
                Round(messages([(leader, whole)]), adds=True),
                Round(adds=True),
                Round(receives=messages([(leader, rows([rank]))])),
            ]
        away = [members for index, members in enumerate(self._members) if index != node]
        return [
            Round(receives=messages((peer, whole) for peer in others), adds=True),
            Round(
                messages((members[0], rows(members)) for members in away),
                messages((members[0], rows(here)) for members in away),
                adds=True,
            ),
            Round(messages((peer, rows([peer])) for peer in others)),
        ]
