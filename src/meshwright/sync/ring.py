"""Ring: pieces go round, one neighbour to the next; as few bytes as can be, and twice as many rounds as ranks.

    rank      0     1     2     3          n elements, P ranks, P pieces
            -> p3 -> p0 -> p1 -> p2 ->     P - 1 rounds that add, after which rank r has piece r whole
            -> p0 -> p1 -> p2 -> p3 ->     P - 1 rounds that pass the whole pieces on

Each rank sends 2 (P-1) messages, 2 (P-1)/P n elements (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", JPDC 2009).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.sync.schedule import Range, Round, cut, messages


class Ring:
    """See the module."""

    def all_reduce(self, rank: int, ranks: int, elements: int) -> list[Round]:
        """See ``Schedule.all_reduce``."""
        pieces = [cut(elements, ranks, index) for index in range(ranks)]
        return ring_rounds(rank, list(range(ranks)), pieces)

    def reduce_scatter(self, rank: int, ranks: int, row: int) -> list[Round]:
        """See ``Schedule.reduce_scatter``."""
        pieces = [cut(ranks * row, ranks, index) for index in range(ranks)]
        return ring_rounds(rank, list(range(ranks)), pieces)[: ranks - 1]


def ring_rounds(place: int, members: Sequence[int], pieces: Sequence[Range]) -> list[Round]:
    """All-reduce of ``pieces`` (one a member) around a ring.

    Args:
        place: this rank's in ``members``.
        members: ranks, in the order of the ring.
        pieces: what goes round; member i gets piece i whole first.
    """
    degree = len(members)
    after, before = members[(place + 1) % degree], members[(place - 1) % degree]
    rounds = []
    for step in range(2 * (degree - 1)):
        adds = step < degree - 1
        out = (place - 1 - step if adds else place + degree - 1 - step) % degree
        rounds.append(
            Round(messages([(after, [pieces[out]])]), messages([(before, [pieces[(out - 1) % degree]])]), adds)
        )
    return rounds
