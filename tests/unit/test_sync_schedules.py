"""All-reduce schedules carried out on plain lists, every rank count from 1 to 8: sums, pairing, closed forms."""

from __future__ import annotations

import pytest

from meshwright.plan import sync_wire
from meshwright.sync.halving_doubling import HalvingDoubling
from meshwright.sync.hierarchical import Hierarchical
from meshwright.sync.leaders import Leaders
from meshwright.sync.ordered import Ordered
from meshwright.sync.ring import Ring
from meshwright.sync.schedule import Round, Schedule
from meshwright.sync.tree import Tree

RANKS = range(1, 9)


def node_maps(ranks: int) -> list[tuple[int, ...]]:
    """One node; nodes of 2 and 3, the last shorter; one rank a node; nodes that alternate."""
    maps = [tuple(rank // size for rank in range(ranks)) for size in (ranks, 2, 3, 1)]
    return [*maps, tuple(rank % 2 for rank in range(ranks))]


def schedules(ranks: int) -> list[tuple[str, Schedule, tuple[int, ...]]]:
    flat = (0,) * ranks
    plain: list[tuple[str, Schedule, tuple[int, ...]]] = [
        ("ring", Ring(), flat), ("tree", Tree(), flat), ("halving-doubling", HalvingDoubling(), flat),
        ("ordered", Ordered(), flat),
    ]  # fmt: skip
    for nodes in node_maps(ranks):
        plain += [("hierarchical", Hierarchical(nodes), nodes), ("leaders", Leaders(nodes), nodes)]
    return plain


def carry_out(rounds: list[list[Round]], inputs: list[list[int]]) -> list[list[int]]:
    """Every rank's values after all rounds, with each message checked against its receiver's expectation."""
    values = [list(row) for row in inputs]
    assert len({len(mine) for mine in rounds}) == 1, "ranks have different numbers of rounds"
    for step in range(len(rounds[0])):
        before = [list(row) for row in values]
        now = [mine[step] for mine in rounds]
        sent = {(rank, one.peer): one.ranges for rank, mine in enumerate(now) for one in mine.sends}
        got = {(one.peer, rank): one.ranges for rank, mine in enumerate(now) for one in mine.receives}
        assert sent == got
        assert all(source != target for source, target in sent)
        assert len({mine.adds for mine in now}) == 1
        adds = now[0].adds
        for source in {source for source, _ in sent} if adds else ():
            # What is read in place may be overwritten by its reader, so it must have one alone.
            mine = [one for (origin, _), ranges in sent.items() if origin == source for one in ranges]
            assert len(set(mine)) == len(mine)
        for (source, target), ranges in sent.items():
            for start, stop in ranges:
                assert 0 <= start < stop <= len(inputs[0])
                for index in range(start, stop):
                    values[target][index] = before[source][index] + (values[target][index] if adds else 0)
    return values


def sent_by(rounds: list[Round]) -> sync_wire.Load:
    found = [message for one in rounds for message in one.sends]
    return sync_wire.Load(len(found), sum(message.elements for message in found))


@pytest.mark.parametrize("ranks", RANKS)
def test_every_all_reduce_sums_and_sends_what_its_closed_form_says(ranks: int) -> None:
    for elements in sorted({0, 1, ranks - 1, ranks, 13, 64}):
        inputs = [[7 * rank + index for index in range(elements)] for rank in range(ranks)]
        expected = [sum(column) for column in zip(*inputs, strict=True)]
        for name, schedule, nodes in schedules(ranks):
            rounds = [schedule.all_reduce(rank, ranks, elements) for rank in range(ranks)]
            assert carry_out(rounds, inputs) == [expected] * ranks, (name, nodes, elements)
            for rank in range(ranks):
                form = sync_wire.all_reduce(name, rank, ranks, elements, nodes)
                assert sent_by(rounds[rank]) == form, (name, nodes, elements, rank)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_reduce_scatter_sums_and_sends_what_its_closed_form_says(ranks: int) -> None:
    for row in (0, 1, 5):
        inputs = [[7 * rank + index for index in range(ranks * row)] for rank in range(ranks)]
        expected = [sum(column) for column in zip(*inputs, strict=True)]
        for name, schedule, nodes in schedules(ranks):
            rounds = [schedule.reduce_scatter(rank, ranks, row) for rank in range(ranks)]
            found = carry_out(rounds, inputs)
            for rank in range(ranks):
                mine = slice(rank * row, (rank + 1) * row)
                assert found[rank][mine] == expected[mine], (name, nodes, row, rank)
                form = sync_wire.reduce_scatter(name, rank, ranks, row, nodes)
                assert sent_by(rounds[rank]) == form, (name, nodes, row, rank)


def test_a_ring_of_four_as_it_is_drawn() -> None:
    rounds = [
        [one.sends[0].ranges[0][0] for one in Ring().all_reduce(rank, 4, 4)] for rank in range(4)
    ]  # which piece goes to the next rank, round by round
    assert rounds == [
        [3, 2, 1, 0, 3, 2],
        [0, 3, 2, 1, 0, 3],
        [1, 0, 3, 2, 1, 0],
        [2, 1, 0, 3, 2, 1],
    ]


def test_a_powers_of_two_halving_sends_2_log2_messages_and_as_few_bytes_as_the_ring() -> None:
    for power in (1, 2, 3):
        ranks = 1 << power
        assert sync_wire.all_reduce("halving-doubling", 0, ranks, 64 * ranks, ()) == (2 * power, 128 * (ranks - 1))
        assert sync_wire.all_reduce("ring", 0, ranks, 64 * ranks, ()) == (2 * (ranks - 1), 128 * (ranks - 1))


def test_across_nodes_the_hierarchical_form_sends_as_a_ring_of_nodes_would() -> None:
    """Eight ranks on two nodes: each node puts 2 (N-1)/N n = n elements on the link between them."""
    nodes = tuple(rank // 4 for rank in range(8))
    for schedule in (Hierarchical(nodes), Leaders(nodes)):
        crossing = sum(
            message.elements
            for rank in range(4)
            for one in schedule.all_reduce(rank, 8, 64)
            for message in one.sends
            if nodes[message.peer] == 1
        )
        assert crossing == 64
