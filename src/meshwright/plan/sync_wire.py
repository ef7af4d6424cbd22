"""What one rank sends in an all-reduce or reduce-scatter, by algorithm: messages and elements, in closed form.

P ranks, n elements, r this rank; ``p(P, i)`` the i-th of P pieces of n whose sizes differ by one at most (larger ones
first), of which a message of none is not sent. A reduce-scatter has n = P rows, and rank r ends with row r.

    algorithm          elements of an all-reduce                               of a reduce-scatter
    ring               2 n - p(P, r) - p(P, r+1)                               n - row
    tree               n (1 to the parent, + 1 a child)                        n to the parent; root: n - row
    halving-doubling   n - p(C, v) + the blocks of 1, 2, 4 .. C/2 pieces       n - own rows
                       that hold v; C the largest power of two up to P
                       beyond 2 (P-C): v = r - (P-C); below: v = r / 2,
                       even r: + n to its partner, odd r: n alone              even r: + row; odd r: n alone
    hierarchical       g lanes, N nodes, lane j of a node of m ranks:          rows that others of the node sum
                       n - p(g, j) + a ring of N on p(g, j) + (m-1) p(g, j);   + rows summed for other nodes
                       the others: n
    leaders            leader of a node of m: a ring of N on n, + (m-1) n;     n - the node's rows + (m-1) rows;
                       the others: n                                           the others: n
    ordered            n - p(P, r) + (P-1) p(P, r)                             n - row

Nothing here is taken from ``sync``: `meshwright check --ledger` and the tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Load(NamedTuple):
    """What one rank sends."""

    messages: int
    elements: int

    def plus(self, other: Load) -> Load:
        """Both."""
        return Load(self.messages + other.messages, self.elements + other.elements)


NOTHING = Load(0, 0)
_Form = Callable[[int, int, int, Sequence[int]], Load]


def all_reduce(algorithm: str, rank: int, ranks: int, elements: int, nodes: Sequence[int], chunks: int = 1) -> Load:
    """What rank ``rank`` of ``ranks`` sends in an all-reduce.

    Args:
        algorithm: made of messages between pairs of ranks, such as ``ring``.
        rank: this one.
        ranks: of the group.
        elements: of the tensor.
        nodes: the node of each rank, for two-level algorithms.
        chunks: into how many the tensor is cut.
    """
    total = NOTHING
    if ranks == 1:
        return total
    for index in range(chunks):
        total = total.plus(_ALL_REDUCE[algorithm](rank, ranks, piece(elements, chunks, index), nodes))
    return total


def reduce_scatter(algorithm: str, rank: int, ranks: int, row: int, nodes: Sequence[int]) -> Load:
    """What rank ``rank`` of ``ranks`` sends in a reduce-scatter of ``ranks`` rows of ``row`` elements."""
    if ranks == 1 or row == 0:
        return NOTHING
    return _REDUCE_SCATTER[algorithm](rank, ranks, row, nodes)


def piece(elements: int, parts: int, index: int) -> int:
    """Elements of the ``index``-th of ``parts`` pieces."""
    return elements // parts + (index < elements % parts)


def _begin(elements: int, parts: int, index: int) -> int:
    return index * (elements // parts) + min(index, elements % parts)


def _ring(place: int, ranks: int, elements: int) -> Load:
    filled = min(elements, ranks)
    own, following = piece(elements, ranks, place), piece(elements, ranks, (place + 1) % ranks)
    return Load(2 * filled - (own > 0) - (following > 0), 2 * elements - own - following)


def _ring_all_reduce(rank: int, ranks: int, elements: int, nodes: Sequence[int]) -> Load:
    return _ring(rank, ranks, elements)


def _all_but_own_row(rank: int, ranks: int, row: int, nodes: Sequence[int]) -> Load:
    return Load(ranks - 1, (ranks - 1) * row)


def _children(rank: int, ranks: int) -> int:
    return max(0, min(2, ranks - 1 - 2 * rank))


def _tree_all_reduce(rank: int, ranks: int, elements: int, nodes: Sequence[int]) -> Load:
    count = (rank > 0) + _children(rank, ranks)
    return Load(count * (elements > 0), count * elements)


def _tree_scatter(rank: int, ranks: int, row: int, nodes: Sequence[int]) -> Load:
    return Load(1, ranks * row) if rank else Load(ranks - 1, (ranks - 1) * row)


def _core(ranks: int) -> int:
    return 1 << (ranks.bit_length() - 1)


def _halving_all_reduce(rank: int, ranks: int, elements: int, nodes: Sequence[int]) -> Load:
    core, folded = _core(ranks), ranks - _core(ranks)
    if rank < 2 * folded and rank % 2:
        return Load(int(elements > 0), elements)
    virtual = rank // 2 if rank < 2 * folded else rank - folded

    def block(of: int, distance: int) -> int:
        first = of // distance * distance
        return _begin(elements, core, first + distance) - _begin(elements, core, first)

    total = NOTHING
    distance = 1
    while distance < core:
        for size in (block(virtual ^ distance, distance), block(virtual, distance)):
            total = total.plus(Load(int(size > 0), size))
        distance *= 2
    return total.plus(Load(int(elements > 0), elements)) if rank < 2 * folded else total


def _halving_scatter(rank: int, ranks: int, row: int, nodes: Sequence[int]) -> Load:
    core, folded = _core(ranks), ranks - _core(ranks)
    if rank < 2 * folded and rank % 2:
        return Load(1, ranks * row)
    own, rounds = (2 if rank < 2 * folded else 1), core.bit_length() - 1
    total = Load(rounds, (ranks - own) * row)
    return total.plus(Load(1, row)) if rank < 2 * folded else total


def _members(nodes: Sequence[int]) -> list[list[int]]:
    return [[rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)]


def _hierarchical_all_reduce(rank: int, ranks: int, elements: int, nodes: Sequence[int]) -> Load:
    groups = _members(nodes)
    here = next(group for group in groups if rank in group)
    lanes, lane = min(map(len, groups)), here.index(rank)
    own = piece(elements, lanes, lane) if lane < lanes else 0
    total = Load(min(elements, lanes) - (own > 0), elements - own)
    if lane < lanes:
        total = total.plus(_ring(groups.index(here), len(groups), own) if len(groups) > 1 else NOTHING)
        total = total.plus(Load((len(here) - 1) * (own > 0), (len(here) - 1) * own))
    return total


def _hierarchical_scatter(rank: int, ranks: int, row: int, nodes: Sequence[int]) -> Load:
    groups = _members(nodes)
    here = next(group for group in groups if rank in group)
    place = {owner: group.index(owner) for group in groups for owner in group}
    summing = {owner: here[place[owner] % len(here)] for owner in range(ranks)}
    given = [owner for owner in range(ranks) if summing[owner] != rank]
    away = [owner for owner in range(ranks) if summing[owner] == rank and owner not in here]
    return Load(len({summing[owner] for owner in given}) + len(away), (len(given) + len(away)) * row)


def _leaders_all_reduce(rank: int, ranks: int, elements: int, nodes: Sequence[int]) -> Load:
    groups = _members(nodes)
    here = next(group for group in groups if rank in group)
    some = int(elements > 0)
    if rank != here[0]:
        return Load(some, elements)
    total = Load((len(here) - 1) * some, (len(here) - 1) * elements)
    return total.plus(_ring(groups.index(here), len(groups), elements)) if len(groups) > 1 else total


def _leaders_scatter(rank: int, ranks: int, row: int, nodes: Sequence[int]) -> Load:
    groups = _members(nodes)
    here = next(group for group in groups if rank in group)
    if rank != here[0]:
        return Load(1, ranks * row)
    return Load(len(groups) - 1 + len(here) - 1, (ranks - len(here) + len(here) - 1) * row)


def _ordered_all_reduce(rank: int, ranks: int, elements: int, nodes: Sequence[int]) -> Load:
    own = piece(elements, ranks, rank)
    some = int(own > 0)
    return Load(min(elements, ranks) - some + (ranks - 1) * some, elements - own + (ranks - 1) * own)


_ALL_REDUCE: dict[str, _Form] = {
    "ring": _ring_all_reduce,
    "tree": _tree_all_reduce,
    "halving-doubling": _halving_all_reduce,
    "hierarchical": _hierarchical_all_reduce,
    "leaders": _leaders_all_reduce,
    "ordered": _ordered_all_reduce,
}
_REDUCE_SCATTER: dict[str, _Form] = {
    "ring": _all_but_own_row,
    "tree": _tree_scatter,
    "halving-doubling": _halving_scatter,
    "hierarchical": _hierarchical_scatter,
    "leaders": _leaders_scatter,
    "ordered": _all_but_own_row,
}
