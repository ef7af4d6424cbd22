"""Tree: sums go up to one root, the result comes down; few rounds, so it is for short messages.

    rank 0                    up: level by level from the leaves, a parent adds what its children send
      rank 1   rank 2         down: the same way back
        3  4     5  6

``2 floor(log2 P)`` rounds; a rank sends all n elements once to its parent and once to each of its at most two children.
Cut into chunks, levels work on different ones at the same time, and the time nears ``2 n`` whatever the ranks.
"""

from __future__ import annotations

from meshwright.sync.schedule import Range, Round, messages


class Tree:
    """See the module."""

    def all_reduce(self, rank: int, ranks: int, elements: int) -> list[Round]:
        """See ``Schedule.all_reduce``."""
        whole = (0, elements)
        return [*_up(rank, ranks, whole), *_down(rank, ranks, whole)]

    def reduce_scatter(self, rank: int, ranks: int, row: int) -> list[Round]:
        """See ``Schedule.reduce_scatter``: up the tree, then the root hands out the rows."""
        rows = [(index * row, (index + 1) * row) for index in range(ranks)]
        if rank == 0:
            last = Round(messages((peer, [rows[peer]]) for peer in range(1, ranks)))
        else:
            last = Round(receives=messages([(0, [rows[rank]])]))
        return [*_up(rank, ranks, (0, ranks * row)), last]


def level(rank: int) -> int:
    """How far from the root."""
    return (rank + 1).bit_length() - 1


def children(rank: int, ranks: int) -> list[int]:
    """Who is below."""
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < ranks]


def _up(rank: int, ranks: int, whole: Range) -> list[Round]:
    rounds = []
    for sending in range(level(ranks - 1), 0, -1):
        up = [((rank - 1) // 2, [whole])] if level(rank) == sending else []
        below = [(child, [whole]) for child in children(rank, ranks) if level(child) == sending]
        rounds.append(Round(messages(up), messages(below), adds=True))
    return rounds


def _down(rank: int, ranks: int, whole: Range) -> list[Round]:
    rounds = []
    for receiving in range(1, level(ranks - 1) + 1):
        below = [(child, [whole]) for child in children(rank, ranks) if level(child) == receiving]
        up = [((rank - 1) // 2, [whole])] if level(rank) == receiving else []
        rounds.append(Round(messages(below), messages(up)))
    return rounds
