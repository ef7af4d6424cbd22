"""Every all-reduce algorithm on real ranks: exact sums, counted messages and bytes, rank order in bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import all_gather_json
from meshwright.comm.record import TrafficRecorder
from meshwright.comm.shared_memory import close_channel, open_channel
from meshwright.errors import InputError
from meshwright.plan import sync_wire
from meshwright.prove.pool import RankPool
from meshwright.sync.all_reduce import ALGORITHMS, Algorithm, all_reduce, make_algorithm
from meshwright.sync.schedules import SCHEDULED

Ranks = Callable[[int], RankPool]
LONG = 1_000_000
CHUNK = 1 << 19


def lengths(ranks: int, *, long: bool) -> list[int]:
    """None, one, around the number of ranks, a prime; 1e6 elements make eight chunks."""
    return sorted({0, 1, ranks - 1, ranks, 1009}) + ([LONG] if long else [])


def algorithms(ranks: int) -> Iterator[tuple[str, Algorithm, tuple[int, ...]]]:
    for name in ALGORITHMS:
        two_level = name in ("hierarchical", "leaders")
        for size in (1, 2, 3) if two_level else (ranks,):
            nodes = tuple(rank // size for rank in range(ranks))
            yield name, make_algorithm(name, nodes, CHUNK), nodes


def inputs(ranks: int, length: int) -> list[Tensor]:
    """Whole numbers, whose sums are exact in float32."""
    return [(torch.arange(length) % 97 + 3 * rank).float() for rank in range(ranks)]


def groups(least: int, most: int) -> Iterator[tuple[int, dist.ProcessGroup]]:
    """The first P ranks of the world as a group, on those ranks."""
    for ranks in range(least, most + 1):
        group = dist.new_group(list(range(ranks)))
        if dist.get_rank() < ranks:
            yield ranks, group
            dist.destroy_process_group(group)


def sums_are_exact(least: int, most: int, shared: bool, long: bool) -> None:
    for ranks, group in groups(least, most):
        if shared and ranks > 1:
            open_channel(group, all_gather_json)
        rank = group.rank()
        for length in lengths(ranks, long=long):
            parts = inputs(ranks, length)
            expected = torch.stack(parts).sum(0) if length else torch.empty(0)
            for name, algorithm, nodes in algorithms(ranks):
                found = parts[rank].clone()
                all_reduce(found, group, algorithm)
                assert torch.equal(found, expected), (name, nodes, ranks, length)
                if length not in (1, 1009):
                    continue
                for op, extreme in (("min", parts[0]), ("max", parts[-1])):
                    found = parts[rank].clone()
                    all_reduce(found, group, algorithm, op=op)
                    assert torch.equal(found, extreme), (name, op, ranks, length)
                found = parts[rank].clone()
                weights = [float(2 * (index + 1)) for index in range(ranks)]
                all_reduce(found, group, algorithm, op="average", weights=weights)
                mean = sum(weight * part for weight, part in zip(weights, parts, strict=True)) / sum(weights)
                assert torch.equal(found, mean), (name, ranks, length)
                whole = torch.cat(parts) + rank
                row = torch.full((length,), -1.0)
                for handle in algorithm.reduce_scatter(row, whole, group):
                    handle.wait()
                assert torch.equal(row, ranks * parts[rank] + sum(range(ranks))), (name, ranks, length)
        close_channel(group)


def counts_equal_closed_forms(least: int, most: int, long: bool) -> int:
    """What the recorder sees sent, one all-reduce and one reduce-scatter after another; how many were compared."""
    compared = 0
    for ranks, group in groups(least, most):
        recorder = TrafficRecorder(lambda _group: "dp")
        with recorder:
            for length in lengths(ranks, long=long):
                for name, algorithm, nodes in algorithms(ranks):
                    if name in SCHEDULED:
                        _compare_counts(recorder, group, length, name, algorithm, nodes)
                        compared += 1
    return compared


def _compare_counts(
    recorder: TrafficRecorder, group: dist.ProcessGroup, length: int, name: str, algorithm: Algorithm,
    nodes: tuple[int, ...],
) -> None:  # fmt: skip
    rank, ranks, count = group.rank(), group.size(), recorder.traffic.transport["send"]
    before = count.messages, count.payload
    all_reduce(torch.ones(length), group, algorithm)
    sent = count.messages - before[0], count.payload - before[1]
    messages, elements = sync_wire.all_reduce(name, rank, ranks, length, nodes, -(-4 * length // CHUNK))
    assert sent == (messages, 4 * elements), (name, nodes, ranks, length)
    if length == LONG:
        return
    before = count.messages, count.payload
    for handle in algorithm.reduce_scatter(torch.empty(length), torch.ones(ranks * length), group):
        handle.wait()
    sent = count.messages - before[0], count.payload - before[1]
    messages, elements = sync_wire.reduce_scatter(name, rank, ranks, length, nodes)
    assert sent == (messages, 4 * elements), (name, nodes, ranks, length)


def ordered_is_the_rank_order_sum(least: int, most: int) -> None:
    for ranks, group in groups(least, most):
        if ranks > 1:
            open_channel(group, all_gather_json)
        for length in lengths(ranks, long=True):
            parts = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) * 100 for rank in range(ranks)]
            expected = parts[0].clone()
            for part in parts[1:]:
                expected = expected + part
            found = parts[group.rank()].clone()
            all_reduce(found, group, make_algorithm("ordered", chunk_bytes=CHUNK))
            assert torch.equal(found, expected), (ranks, length)
        close_channel(group)


@pytest.mark.parametrize("shared", [True, False])
def test_sums_are_exact_on_up_to_four_ranks(ranks: Ranks, shared: bool) -> None:
    ranks(4).run(sums_are_exact, 1, 4, shared, not shared)


def test_counts_equal_closed_forms_on_up_to_four_ranks(ranks: Ranks) -> None:
    assert min(ranks(4).run(counts_equal_closed_forms, 3, 4, False)) == 5 * 10  # lengths, algorithms


def test_ordered_is_bit_equal_to_the_sum_in_rank_order(ranks: Ranks) -> None:
    ranks(4).run(ordered_is_the_rank_order_sum, 1, 4)


@pytest.mark.all
@pytest.mark.parametrize("shared", [True, False])
def test_sums_are_exact_on_one_to_eight_ranks(ranks: Ranks, shared: bool) -> None:
    ranks(8).run(sums_are_exact, 1, 8, shared, True, timeout=170)


@pytest.mark.all
def test_counts_equal_closed_forms_on_one_to_eight_ranks(ranks: Ranks) -> None:
    ranks(8).run(counts_equal_closed_forms, 1, 8, True, timeout=170)


@pytest.mark.all
def test_ordered_is_bit_equal_to_the_sum_in_rank_order_on_one_to_eight_ranks(ranks: Ranks) -> None:
    ranks(8).run(ordered_is_the_rank_order_sum, 1, 8, timeout=170)


def refusals() -> list[str]:
    group, tensor, plain = dist.group.WORLD, torch.ones(3), make_algorithm("ring")
    said = []
    for action in (
        lambda: all_reduce(tensor, group, plain, op="product"),
        lambda: all_reduce(tensor, group, plain, weights=[1.0, 1.0]),
        lambda: all_reduce(tensor, group, plain, op="average", weights=[1.0]),
        lambda: make_algorithm("rings"),
        lambda: make_algorithm("leaders"),
    ):
        try:
            action()
        except InputError as error:
            said.append(str(error))
    return said


def test_what_the_contract_refuses(ranks: Ranks) -> None:
    assert ranks(4).run(refusals)[0] == [
        "op: 'product' is not a reduction; use sum, min, max or average",
        "weights: [1.0, 1.0] are for op=average, not sum; leave them out",
        "weights: [1.0] must be one a rank (4), none negative and not all zero",
        f"algorithm: 'rings' is not an all-reduce; use one of {', '.join(ALGORITHMS)}",
        "algorithm: leaders must know the node of each rank; give nodes",
    ]
