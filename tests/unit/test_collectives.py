"""The collectives against their definitions: exact sums, rank order in bits, every length and dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import (
    Handle,
    all_gather,
    all_gather_json,
    all_reduce,
    all_to_all,
    barrier,
    reduce_scatter,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def lengths(degree: int, dtype: torch.dtype) -> list[int]:
    """None, one, around the number of ranks, a prime; the last goes by direct sends in every dtype."""
    return sorted({0, 1, degree - 1, degree, 13, 100_000 if dtype == torch.float32 else 40_009})


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    """Every rank's input: small integers, so that all sums are exact in every dtype."""
    return [(torch.arange(length) % 7 + rank).to(dtype) for rank in range(dist.get_world_size())]


def random_inputs(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    seeds = [torch.Generator().manual_seed(rank) for rank in range(dist.get_world_size())]
    return [torch.randn(length, generator=seed).mul(100).to(dtype) for seed in seeds]


def rank_order_sum(parts: list[Tensor]) -> Tensor:
    """The definition: ((p0 + p1) + p2) + ...; 16-bit parts in float32, rounded once."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def exact_everywhere(dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    group, degree, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for dtype in dtypes:
        for length in lengths(degree, dtype):
            whole = inputs(degree * length, dtype)
            total = sum(whole[1:], whole[0])
            mine = slice(rank * length, (rank + 1) * length)
            output = torch.empty(length, dtype=dtype)
            reduce_scatter(output, whole[rank].clone(), group)
            assert torch.equal(output, total[mine]), (length, dtype)
            gathered = torch.empty(degree * length, dtype=dtype)
            all_gather(gathered, whole[rank][:length].clone(), group)
            assert torch.equal(gathered, torch.cat([part[:length] for part in whole])), (length, dtype)
            swapped = torch.empty(degree * length, dtype=dtype)
            all_to_all(swapped, whole[rank].clone(), group)
            assert torch.equal(swapped, torch.cat([part[mine] for part in whole])), (length, dtype)
            for ordered in (False, True):
                reduced = whole[rank][:length].clone()
                all_reduce(reduced, group, ordered=ordered)
                assert torch.equal(reduced, total[:length]), (length, dtype)
            for op in ("max", "min"):
                extreme = whole[rank][:length].clone()
                all_reduce(extreme, group, op=op)
                assert torch.equal(extreme, whole[degree - 1 if op == "max" else 0][:length]), (length, dtype)


def in_rank_order() -> None:
    group, degree, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        for length in (5, 1009, 300_007):
            parts = random_inputs(degree * length, dtype)
            expected = rank_order_sum(parts)
            output = torch.empty(length, dtype=dtype)
            reduce_scatter(output, parts[rank].clone(), group)
            assert torch.equal(output, expected[rank * length : (rank + 1) * length]), (length, dtype)
            reduced = parts[rank].clone()
            all_reduce(reduced, group, ordered=True)
            assert torch.equal(reduced, expected), (length, dtype)


def many_under_way() -> None:
    """Operations started one after another and waited for in another order do not mix."""
    group, degree, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    sizes = (70_000, 3, 20_000, 64)
    scattered, gathered, handles = [], [], []
    for size in sizes:
        whole = inputs(degree * size, torch.float32)
        scattered.append(torch.empty(size))
        gathered.append(torch.empty(degree * size))
        handles.append(reduce_scatter(scattered[-1], whole[rank], group, asynchronous=True))
        handles.append(all_gather(gathered[-1], whole[rank][:size].clone(), group, asynchronous=True))
    for handle in reversed(handles):
        assert isinstance(handle, Handle) and isinstance(handle, dist.Work)
        assert not handle.is_completed()
        handle.wait()
        handle.wait()
        assert handle.is_completed()
    for size, scatter, gather in zip(sizes, scattered, gathered, strict=True):
        whole = inputs(degree * size, torch.float32)
        assert torch.equal(scatter, sum(whole[1:], whole[0])[rank * size : (rank + 1) * size])
        assert torch.equal(gather, torch.cat([part[:size] for part in whole]))
    reduced = [inputs(size, torch.float64)[rank] for size in sizes]
    works = [all_reduce(tensor, group, asynchronous=True) for tensor in reduced]
    for work in works:
        work.wait()
    for size, tensor in zip(sizes, reduced, strict=True):
        assert torch.equal(tensor, sum(inputs(size, torch.float64)[1:], inputs(size, torch.float64)[0]))


def in_place() -> None:
    group, degree, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for size in (11, 150_001):
        parts = random_inputs(degree * size)
        flat = parts[rank].clone()
        mine = flat[rank * size : (rank + 1) * size]
        reduce_scatter(mine, flat, group)
        assert torch.equal(mine, rank_order_sum(parts)[rank * size : (rank + 1) * size])
        all_gather(flat, mine, group)
        assert torch.equal(flat, rank_order_sum(parts))


def wider_output() -> None:
    """16-bit parts summed into float32: no rounding of the sum at all."""
    group, degree, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for size in (40, 90_000):
        parts = random_inputs(degree * size, torch.bfloat16)
        output = torch.empty(size)
        reduce_scatter(output, parts[rank].clone(), group)
        wide = rank_order_sum([part.float() for part in parts])
        assert torch.equal(output, wide[rank * size : (rank + 1) * size])


def control() -> list[object]:
    group, rank = dist.group.WORLD, dist.get_rank()
    barrier(group)
    nan = torch.tensor([float("nan") if rank == 0 else 1.0])
    all_reduce(nan, group, op="max")
    assert nan.isnan().all()
    return all_gather_json({"rank": rank, "text": "é" * rank, "none": None}, group)


def strange_dtypes() -> None:
    group, degree, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float8_e4m3fn, torch.int16, torch.bool):
        for size in (9, 200_000):
            mine = torch.full((size,), rank % 2, dtype=torch.uint8).to(dtype)
            gathered = torch.empty(degree * size, dtype=dtype)
            all_gather(gathered, mine, group)
            expected = torch.arange(degree).remainder(2).repeat_interleave(size).to(torch.uint8).to(dtype)
            assert torch.equal(gathered.view(torch.uint8), expected.view(torch.uint8))


def leaves_inputs_alone() -> None:
    group, degree, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for size in (10, 100_000):
        flat = random_inputs(degree * size)[rank]
        before = flat.clone()
        reduce_scatter(torch.empty(size), flat, group)
        all_gather(torch.empty(degree * degree * size), flat, group)
        assert torch.equal(flat, before)
        parameter = torch.nn.Parameter(flat.clone())
        gathered = torch.empty(degree * degree * size)
        all_gather(gathered, parameter, group)
        assert gathered.grad_fn is None


CASES = (
    in_rank_order,
    many_under_way,
    in_place,
    wider_output,
    strange_dtypes,
    leaves_inputs_alone,
)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_collectives(ranks, case, size):
    ranks(size).run(case)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_exact_sums(ranks, size):
    ranks(size).run(exact_everywhere, DTYPES if size < 3 else (torch.float32, torch.bfloat16))


def test_eight_ranks(ranks):
    ranks(8).run(exact_everywhere, (torch.float32,))
    ranks(8).run(in_rank_order)


@pytest.mark.parametrize("size", [1, 3])
def test_control_messages(ranks, size):
    expected = [{"rank": rank, "text": "é" * rank, "none": None} for rank in range(size)]
    assert ranks(size).run(control) == [expected] * size


def wrong_lengths() -> list[str]:
    messages = []
    for function in (reduce_scatter, all_gather):
        with pytest.raises(ValueError) as refusal:
            function(torch.empty(3), torch.empty(5), dist.group.WORLD)
        messages.append(str(refusal.value))
    with pytest.raises(ValueError) as refusal:
        all_to_all(torch.empty(3), torch.empty(3), dist.group.WORLD)
    return [*messages, str(refusal.value)]


def test_wrong_lengths_are_refused_before_anything_is_sent(ranks):
    first, second, third = ranks(2).run(wrong_lengths)[1]
    assert first == "reduce_scatter: 5 elements do not make 2 x 3"
    assert second == "all_gather: 3 elements do not hold 2 x 5"
    assert third == "all_to_all: 3 to 3 elements over 2 ranks"
