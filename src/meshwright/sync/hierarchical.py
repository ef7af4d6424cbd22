"""Hierarchical: reduce-scatter inside each node, all-reduce across nodes, all-gather inside each node.

    node A   lane 0  lane 1  |  rank 2        g lanes: the first ranks of each node, as many as the smallest node has
    node B   lane 0  lane 1                   piece j of g belongs to lane j of every node

    1 round      in the node: piece j to lane j, which adds
    2 (N-1)      across N nodes: a ring of the lanes j, on piece j
    1 round      in the node: lane j gives its whole piece to all

Each node puts ``2 (N-1)/N n`` elements on the links between nodes, however many ranks it has; a flat ring does the
same only where neighbours in the ring share nodes, and in ``2 (P-1)`` rounds. Nodes may differ in size.
"""

from __future__ import annotations

from meshwright.sync.ring import ring_rounds
from meshwright.sync.schedule import Range, Round, TwoLevels, cut, messages


class Hierarchical(TwoLevels):
    """See the module."""

    def all_reduce(self, rank: int, ranks: int, elements: int) -> list[Round]:
        """See ``Schedule.all_reduce``."""
        node = self._node[rank]
        here = self._members[node]
        lanes = min(map(len, self._members))
        pieces = [cut(elements, lanes, lane) for lane in range(lanes)]
        lane = here.index(rank)
        others = [peer for peer in here if peer != rank]
        mine = [pieces[lane]] if lane < lanes else []
        leads = [(index, peer) for index, peer in enumerate(here[:lanes]) if peer != rank]
        inside = Round(
            messages((peer, [pieces[index]]) for index, peer in leads),
            messages((peer, mine) for peer in others),
            adds=True,
        )
        gather = Round(
            messages((peer, mine) for peer in others), messages((peer, [pieces[index]]) for index, peer in leads)
        )
        return [inside, *self._across(node, lane, pieces[lane] if lane < lanes else None), gather]

    def _across(self, node: int, lane: int, piece: Range | None) -> list[Round]:
        count = len(self._members)
        if piece is None:  # no lane: stands by
            return [Round(adds=step < count - 1) for step in range(2 * (count - 1))]
        ring = [members[lane] for members in self._members]
        start, stop = piece
        parts = [cut(stop - start, count, index) for index in range(count)]
        return ring_rounds(node, ring, [(start + low, start + high) for low, high in parts])

    def reduce_scatter(self, rank: int, ranks: int, row: int) -> list[Round]:
        """See ``Schedule.reduce_scatter``.

        In its node, a row is summed by the rank that has the place of the row's owner there; those send it to the
        owner, who adds what the nodes have.
        """
        here = self._members[self._node[rank]]

        def rows(owners: list[int]) -> list[Range]:
            return [(owner * row, (owner + 1) * row) for owner in owners]

        def summed_by(peer: int, members: list[int]) -> list[int]:
            return [owner for owner in range(ranks) if members[self._place(owner) % len(members)] == peer]

        mine = summed_by(rank, here)
        others = [peer for peer in here if peer != rank]
        inside = Round(
            messages((peer, rows(summed_by(peer, here))) for peer in others),
            messages((peer, rows(mine)) for peer in others),
            adds=True,
        )
        away = [owner for owner in mine if owner not in here]
        givers = [
            members[self._place(rank) % len(members)]
            for node, members in enumerate(self._members)
            if node != self._node[rank]
        ]
        across = Round(
            messages((owner, rows([owner])) for owner in away),
            messages((giver, rows([rank])) for giver in givers),
            adds=True,
        )
        return [inside, across]

    def _place(self, rank: int) -> int:
        """Of a rank among those of its node."""
        return self._members[self._node[rank]].index(rank)
