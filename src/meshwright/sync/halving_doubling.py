"""Recursive halving and doubling: partners swap halves of ever smaller blocks, then the same way back.

    P = 4        distance 2          distance 1          distance 1          distance 2
    rank 0       gets half 0         gets quarter 0      gets quarter 1      gets half 1
                 of 2's, adds        of 1's, adds        from 1              from 2

As few bytes as the ring, ``2 (P-1)/P n``, in ``2 log2 P`` messages (Rabenseifner; Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 2005). Where P is no power of two, the first
``2 (P - 2^k)`` ranks pair up: the odd one hands all to its partner, stands by, and gets the result.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.sync.schedule import Range, Round, cut, messages


class HalvingDoubling:
    """See the module."""

    def all_reduce(self, rank: int, ranks: int, elements: int) -> list[Round]:
        """See ``Schedule.all_reduce``."""
        core = core_ranks(ranks)
        folded = ranks - core
        whole = [(0, elements)]

        def block(first: int, last: int) -> Range:
            return cut(elements, core, first)[0], cut(elements, core, last)[1]

        rounds = _fold(rank, folded, whole) if folded else []
        rounds += _halve(rank, folded, core, block) + _double(rank, folded, core, block)
        if folded:
            rounds.append(_unfold(rank, folded, whole, whole))
        return rounds

    def reduce_scatter(self, rank: int, ranks: int, row: int) -> list[Round]:
        """See ``Schedule.reduce_scatter``: halving only; a pair's rows end with its first rank, who passes one on."""
        core = core_ranks(ranks)
        folded = ranks - core

        def first_row(virtual: int) -> int:
            return (2 * virtual if virtual < folded else virtual + folded) * row

        def block(first: int, last: int) -> Range:
            return first_row(first), first_row(last + 1)

        rounds = _fold(rank, folded, [(0, ranks * row)]) if folded else []
        rounds += _halve(rank, folded, core, block)
        if folded:
            mine, next_row = (rank * row, (rank + 1) * row), ((rank + 1) * row, (rank + 2) * row)
            rounds.append(_unfold(rank, folded, [next_row], [mine]))
        return rounds


def core_ranks(ranks: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (ranks.bit_length() - 1)


def virtual_rank(rank: int, folded: int) -> int | None:
    """Place among the core ranks; None for one that stands by."""
    if rank >= 2 * folded:
        return rank - folded
    return rank // 2 if rank % 2 == 0 else None


def _real(virtual: int, folded: int) -> int:
    return 2 * virtual if virtual < folded else virtual + folded


def _fold(rank: int, folded: int, whole: list[Range]) -> list[Round]:
    if rank >= 2 * folded:
        return [Round(adds=True)]
    if rank % 2:
        return [Round(messages([(rank - 1, whole)]), adds=True)]
    return [Round(receives=messages([(rank + 1, whole)]), adds=True)]


def _unfold(rank: int, folded: int, given: list[Range], got: list[Range]) -> Round:
    if rank >= 2 * folded:
        return Round()
    if rank % 2:
        return Round(receives=messages([(rank - 1, got)]))
    return Round(messages([(rank + 1, given)]))


def _halve(rank: int, folded: int, core: int, block: Callable[[int, int], Range]) -> list[Round]:
    """Keep the half of the block that holds one's own piece, and give the partner the other."""
    virtual, rounds, distance = virtual_rank(rank, folded), [], core // 2
    while distance:
        if virtual is None:
            rounds.append(Round(adds=True))
        else:
            partner = virtual ^ distance
            mine, theirs = virtual // distance * distance, partner // distance * distance
            peer = _real(partner, folded)
            sends = messages([(peer, [block(theirs, theirs + distance - 1)])])
            rounds.append(Round(sends, messages([(peer, [block(mine, mine + distance - 1)])]), adds=True))
        distance //= 2
    return rounds


def _double(rank: int, folded: int, core: int, block: Callable[[int, int], Range]) -> list[Round]:
    """Swap whole blocks, each twice as large as the one before."""
    virtual, rounds, distance = virtual_rank(rank, folded), [], 1
    while distance < core:
        if virtual is None:
            rounds.append(Round())
        else:
            partner = virtual ^ distance
            mine, theirs = virtual // distance * distance, partner // distance * distance
            peer = _real(partner, folded)
            sends = messages([(peer, [block(mine, mine + distance - 1)])])
            rounds.append(Round(sends, messages([(peer, [block(theirs, theirs + distance - 1)])])))
        distance *= 2
    return rounds
