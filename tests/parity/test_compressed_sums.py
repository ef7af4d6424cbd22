"""Compressed sums over real groups: nothing is lost, only late; and replicas that meet now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.copies import Copies, Span
from meshwright.comm.operations import Operations
from meshwright.prove.pool import RankPool
from meshwright.sync.codec import Codec
from meshwright.sync.compress_adam import OneBitMomentum
from meshwright.sync.compress_blocks import BlockScaled
from meshwright.sync.compress_cast import Cast
from meshwright.sync.compress_dgc import DeepGradientCompression
from meshwright.sync.compress_powersgd import PowerSgd
from meshwright.sync.compress_qsgd import Qsgd
from meshwright.sync.compress_sign import Sign
from meshwright.sync.compressed import CompressedReducer, GroupSum
from meshwright.sync.diloco import DiLoCo
from meshwright.sync.easgd import Easgd
from meshwright.sync.local import Level, LocalSgd
from meshwright.sync.memory import Memories
from meshwright.sync.two_stage import TwoStage

Ranks = Callable[[int], RankPool]

SPANS = [Span("a", 0, (12, 8)), Span("b", 96, (5,)), Span("c", 101, (7, 9))]
SIZE = 168
LOSSY = {
    "fp16": lambda memories: TwoStage(Cast("fp16"), memories),
    "bf16": lambda memories: TwoStage(Cast("bf16"), memories),
    "sign": lambda memories: TwoStage(Sign(16), memories),
    "int8": lambda memories: TwoStage(BlockScaled(16), memories),
    "fp8": lambda memories: TwoStage(BlockScaled(16, "fp8"), memories),
    "powersgd": lambda memories: PowerSgd(memories, rank=2),
    "dgc": lambda memories: DeepGradientCompression(memories, sparsity=0.9),
}
EXACT = {
    "sign, block 1": lambda memories: TwoStage(Sign(1), memories),
    "qsgd, block 1": lambda memories: TwoStage(Qsgd(1, 4), memories, feedback=False),
    "int8, block 1": lambda memories: TwoStage(BlockScaled(1), memories),
    "fp8, block 1": lambda memories: TwoStage(BlockScaled(1, "fp8"), memories),
    "powersgd, full rank": lambda memories: PowerSgd(memories, rank=12, least_saving=0.0),
    "dgc, all": lambda memories: DeepGradientCompression(memories, sparsity=0.0),
}


def gradient(step: int, rank: int) -> Tensor:
    """What rank ``rank`` hands in at a step."""
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


@contextmanager
def made(*members: list[int]) -> Iterator[list[dist.ProcessGroup | None]]:
    """A group for each list of ranks; None where this rank is in none. They end with the block."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [
        group if dist.get_rank() in ranks and len(ranks) > 1 else None
        for group, ranks in zip(groups, members, strict=True)
    ]
    try:
        yield mine
    finally:
        for group, ranks in zip(groups, members, strict=True):
            if dist.get_rank() in ranks:
                dist.destroy_process_group(group)


@contextmanager
def copies_of(shards: int) -> Iterator[Copies]:
    """The ranks as ``copies x shards``."""
    size, world = dist.get_world_size(), dist.group.WORLD
    assert world is not None
    rows = [list(range(start, start + shards)) for start in range(0, size, shards)]
    columns = [list(range(index, size, shards)) for index in range(shards)]
    with made(*rows, *columns) as groups:
        shard = next((group for group in groups[: len(rows)] if group is not None), None)
        copy = next((group for group in groups[len(rows) :] if group is not None), None)
        yield Copies(world, shard, copy)


def run(operations: Operations) -> None:
    for handle in operations:
        handle.wait()


def sum_over(
    method: str, shards: int, steps: int, only_slow: bool = False, rejected: int | None = None
) -> list[dict[str, Any]]:
    """Sum some steps' gradients; of each step my chunk, and what this rank remembers after it."""
    memories = Memories()
    summing: GroupSum = (LOSSY | EXACT)[method](memories)
    reducer = CompressedReducer(summing, memories, dtype=torch.float64, device=torch.device("cpu"), only_slow=only_slow)
    with copies_of(shards) as copies:
        return _steps(reducer, copies, steps, rejected)


def sum_by_node(method: str, inside: int, steps: int, rejected: int | None = None) -> list[dict[str, Any]]:
    """The same of replicated ranks, ``inside`` of them in a node."""
    memories = Memories()
    summing: GroupSum = (LOSSY | EXACT)[method](memories)
    with copies_of(1) as copies, copies_of(inside) as nodes:
        reducer = CompressedReducer(
            summing, memories, dtype=torch.float64, device=torch.device("cpu"), only_slow=True, nodes=nodes
        )
        history = _steps(reducer, copies, steps, rejected)
    residuals = [memory.kept.numel() for memory in memories if memory.what == "residual" and memory.level != "back"]
    assert residuals == ([SIZE // inside] if method in LOSSY else residuals)
    return history


def _steps(reducer: CompressedReducer, copies: Copies, steps: int, rejected: int | None) -> list[dict[str, Any]]:
    reducer.prepare("buffer", SIZE, SPANS, copies)
    history = []
    for step in range(steps):
        reducer.begin(step)
        values = gradient(step, dist.get_rank())
        if step == rejected:
            values[3] = float("nan")
        run(reducer.reduce("buffer", values, copies))
        reducer.settle(step != rejected)
        start, stop = copies.chunk(SIZE)
        waiting = torch.zeros(SIZE, dtype=torch.float64)
        for memory in reducer.memories:
            if memory.what == "residual":
                waiting[memory.start : memory.start + memory.kept.numel()] += memory.kept
        history.append({"start": start, "chunk": values[start:stop].numpy().copy(), "waiting": waiting.numpy().copy()})
    return history


def sums_of(results: list[list[dict[str, Any]]], step: int, shards: int) -> Any:
    """The whole sum of a step, from one copy; every copy must have the same bits."""
    whole = numpy.zeros(SIZE)
    for rank, history in enumerate(results):
        entry = history[step]
        where = slice(entry["start"], entry["start"] + len(entry["chunk"]))
        if rank < shards:
            whole[where] = entry["chunk"]
        else:
            assert numpy.array_equal(whole[where], entry["chunk"])
    return whole


@pytest.mark.parametrize("method", LOSSY)
@pytest.mark.parametrize(("shards", "only_slow"), [(1, False), (2, False), (2, True), (4, False)])
def test_sent_and_waiting_add_up_to_the_gradients(ranks: Ranks, method: str, shards: int, only_slow: bool) -> None:
    if method == "powersgd" and shards > 1:
        shards, only_slow = 4, False  # chunks of two shards and two copies would cut its matrices
    results = ranks(4).run(sum_over, method, shards, 4, only_slow)
    handed_in = numpy.zeros(SIZE)
    sent = numpy.zeros(SIZE)
    for step in range(4):
        handed_in += sum(gradient(step, rank).numpy() for rank in range(4))
        found = sums_of(results, step, shards)
        assert not numpy.allclose(found, sum(gradient(step, rank).numpy() for rank in range(4)), rtol=1e-9)
        sent += found
        waiting = sum(history[step]["waiting"] for history in results)
        assert numpy.abs(sent + waiting - handed_in).max() < 1e-12


BY_PIECES = [method for method in LOSSY if method != "powersgd"]  # whose matrices pieces would cut


@pytest.mark.parametrize("method", BY_PIECES)
def test_between_nodes_alone_nothing_is_lost(ranks: Ranks, method: str) -> None:
    results = ranks(4).run(sum_by_node, method, 2, 4)
    handed_in, sent = numpy.zeros(SIZE), numpy.zeros(SIZE)
    for step in range(4):
        summed = sum(gradient(step, rank).numpy() for rank in range(4))
        handed_in += summed
        found = sums_of(results, step, 1)  # whole, and the same bits on every rank
        assert not numpy.allclose(found, summed, rtol=1e-9)
        sent += found
        waiting = sum(history[step]["waiting"] for history in results)
        assert numpy.abs(sent + waiting - handed_in).max() < 1e-12


def test_between_nodes_alone_what_is_inside_a_node_is_whole(ranks: Ranks) -> None:
    """Two nodes' sums, each rounded once; then the sum of each rank's row of its piece once more."""
    results = ranks(4).run(sum_by_node, "int8", 2, 1)
    codec: Codec = BlockScaled(16)
    near = [gradient(0, first) + gradient(0, first + 1) for first in (0, 2)]
    expected = []
    for row in torch.stack(near).view(2, 4, -1).unbind(1):  # piece, then row of it: four in all
        total = sum(codec.decode(codec.encode(each.view(1, -1), 0), SIZE // 4, torch.float64) for each in row)
        expected.append(codec.decode(codec.encode(total, 0), SIZE // 4, torch.float64).view(-1))
    for history in results:
        assert numpy.array_equal(history[0]["chunk"], torch.cat(expected).numpy())


@pytest.mark.parametrize("method", [method for method in EXACT if not method.startswith("powersgd")])
def test_lossless_settings_are_sums_between_nodes_too(ranks: Ranks, method: str) -> None:
    results = ranks(4).run(sum_by_node, method, 2, 2)
    for step in range(2):
        expected = sum(gradient(step, rank).numpy() for rank in range(4))
        assert numpy.abs(sums_of(results, step, 1) - expected).max() < 1e-12


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_lossless_settings_are_sums(ranks: Ranks, method: str, shards: int) -> None:
    shards = 4 if method.startswith("powersgd") and shards == 2 else shards
    results = ranks(4).run(sum_over, method, shards, 2)
    for step in range(2):
        expected = sum(gradient(step, rank).numpy() for rank in range(4))
        assert numpy.abs(sums_of(results, step, shards) - expected).max() < 1e-12


@pytest.mark.parametrize("method", ["sign", "powersgd", "dgc"])
def test_a_rejected_step_leaves_no_trace(ranks: Ranks, method: str) -> None:
    results = ranks(2).run(sum_over, method, 1, 3, False, 1)
    for history in results:
        assert not numpy.isfinite(history[1]["chunk"]).all()
        assert numpy.array_equal(history[1]["waiting"], history[0]["waiting"])
        assert numpy.isfinite(history[2]["chunk"]).all()


def momentum_of(kind: str, warmup_steps: int, steps: int, block: int, inside: int = 1) -> list[Any]:
    """Replacement gradients, step by step; ``inside`` ranks are a node."""
    memories, device = Memories(), torch.device("cpu")
    method = OneBitMomentum(memories, kind=kind, beta=0.9, block=block, warmup_steps=warmup_steps)  # type: ignore[arg-type]
    with copies_of(1) as copies, copies_of(inside) as nodes:
        by_node = nodes if inside > 1 else None
        reducer = CompressedReducer(
            method, memories, dtype=torch.float64, device=device, only_slow=by_node is not None, nodes=by_node
        )
        return [entry["chunk"] for entry in _steps(reducer, copies, steps, None)]


def test_one_bit_momentum_between_nodes(ranks: Ranks) -> None:
    """Each rank has the momentum of its piece alone, and all the gradient that leads to all of it."""
    expected = [sum(gradient(step, rank).numpy() for rank in range(4)) for step in range(3)]
    for warmup_steps, block in ((3, 16), (1, 1)):
        results = ranks(4).run(momentum_of, "one-bit-adam", warmup_steps, 3, block, 2)
        for step in range(3):
            assert all(numpy.array_equal(found[step], results[0][step]) for found in results)
            assert numpy.abs(results[0][step] - expected[step]).max() < 1e-12


def test_one_bit_momentum(ranks: Ranks) -> None:
    expected = [sum(gradient(step, rank).numpy() for rank in range(2)) for step in range(3)]
    for warmup_steps, block in ((3, 16), (1, 1)):  # full rounds alone; one-bit rounds that lose nothing
        (found, again) = ranks(2).run(momentum_of, "one-bit-adam", warmup_steps, 3, block)
        for step in range(3):
            assert numpy.array_equal(found[step], again[step])
            assert numpy.abs(found[step] - expected[step]).max() < 1e-12
    # One bit a number: the momentum m = b m + (1 - b) g' has blocks of one absolute value.
    (found, _) = ranks(2).run(momentum_of, "one-bit-adam", 1, 2, 8)
    momentum = 0.9 * 0.1 * found[0] + 0.1 * found[1]
    row = numpy.abs(momentum).reshape(2, -1)
    assert all(numpy.allclose(half[start : start + 8], half[start]) for half in row for start in range(0, 84, 8))


def velocities(masking: bool, sparsity: float) -> list[Any]:
    memories = Memories()
    method = DeepGradientCompression(memories, sparsity=sparsity, momentum=0.9, masking=masking)
    reducer = CompressedReducer(method, memories, dtype=torch.float64, device=torch.device("cpu"))
    with copies_of(1) as copies:
        history = _steps(reducer, copies, 4, None)
    return [sum(entry["chunk"] for entry in history), history[-1]["waiting"]]


def test_momentum_correction(ranks: Ranks) -> None:
    """What was sent and what waits is the sum of the velocities of dense momentum SGD."""
    velocity, expected = numpy.zeros(SIZE), numpy.zeros(SIZE)
    for step in range(4):
        velocity = 0.9 * velocity + sum(gradient(step, rank).numpy() for rank in range(2))
        expected += velocity
    for sparsity in (0.0, 0.9):
        results = ranks(2).run(velocities, False, sparsity)
        assert numpy.abs(results[0][0] + results[0][1] + results[1][1] - expected).max() < 1e-12
    plain = sum(gradient(step, rank).numpy() for step in range(4) for rank in range(2))
    results = ranks(2).run(velocities, True, 0.0)  # masking of all: no momentum is left
    assert numpy.abs(results[0][0] - plain).max() < 1e-12


def test_two_stages_equal_their_emulation(ranks: Ranks) -> None:
    results = ranks(4).run(sum_over, "int8", 1, 1)
    codec: Codec = BlockScaled(16)
    rows = torch.stack([gradient(0, rank) for rank in range(4)]).view(4, 4, -1)
    sums = []
    for owner in range(4):
        total = torch.zeros(SIZE // 4, dtype=torch.float64)
        for rank in range(4):
            payload = codec.encode(rows[rank, owner].view(1, -1), 0)
            total += codec.decode(payload, SIZE // 4, torch.float64).view(-1)
        sums.append(codec.decode(codec.encode(total.view(1, -1), 0), SIZE // 4, torch.float64).view(-1))
    assert numpy.array_equal(results[0][0]["chunk"], torch.cat(sums).numpy())


# -- replicas that meet -------------------------------------------------------------------------------


def replica(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((3, 4), (5,), (2, 2))]


def whole(values: list[Tensor]) -> Any:
    return torch.cat([value.reshape(-1) for value in values]).numpy().copy()


def average(tokens: list[int]) -> Any:
    values, world = replica(dist.get_rank()), dist.group.WORLD
    assert world is not None
    strategy = LocalSgd(values, [Level(world, 2)])
    strategy.count(tokens[dist.get_rank()])
    assert not strategy.after(1)
    model = whole(strategy.model())
    assert strategy.after(2)
    assert numpy.array_equal(model, whole(values))
    return model


@pytest.mark.parametrize("tokens", [[3, 1], [5, 0], [0, 0]])
def test_local_sgd_weighs_by_tokens(ranks: Ranks, tokens: list[int]) -> None:
    results = ranks(2).run(average, tokens)
    weights = [count / sum(tokens) if sum(tokens) else 0.5 for count in tokens]
    expected = sum(weight * whole(replica(rank)) for rank, weight in enumerate(weights))
    for found in results:
        assert numpy.abs(found - expected).max() < 1e-15
        assert numpy.array_equal(found, results[0])


def by_levels() -> Any:
    rank, world = dist.get_rank(), dist.group.WORLD
    values = replica(rank)
    with made([0, 1], [2, 3]) as groups:
        near = groups[rank // 2]
        assert near is not None and world is not None
        strategy = LocalSgd(values, [Level(near, 1), Level(world, 2)])
        strategy.count(1 + rank)
        strategy.after(1)
        first = whole(values)
        strategy.count(1 + rank)
        strategy.after(2)
    return first, whole(values)


def test_hierarchical_averaging(ranks: Ranks) -> None:
    results = ranks(4).run(by_levels)
    values = [whole(replica(rank)) for rank in range(4)]
    near = [(values[0] + 2 * values[1]) / 3, (3 * values[2] + 4 * values[3]) / 7]
    for rank, (first, second) in enumerate(results):
        assert numpy.abs(first - near[rank // 2]).max() < 1e-14
        assert numpy.abs(second - (3 * near[0] + 7 * near[1]) / 10).max() < 1e-14


def elastic() -> Any:
    values, world = replica(dist.get_rank()), dist.group.WORLD
    assert world is not None
    strategy = Easgd(replica(9), world, 2, 0.2)
    strategy._flat.tensors = values  # replicas that have already gone apart from the center
    assert not strategy.after(1)
    assert strategy.after(2)
    return whole(values), whole(strategy.model())


def test_elastic_averaging_conserves(ranks: Ranks) -> None:
    results = ranks(4).run(elastic)
    center, before = whole(replica(9)), [whole(replica(rank)) for rank in range(4)]
    after = results[0][1]
    assert numpy.abs(after - (center + 0.2 * sum(x - center for x in before))).max() < 1e-14
    for rank, (x, same) in enumerate(results):
        assert numpy.array_equal(same, after)
        assert numpy.abs(x - (before[rank] - 0.2 * (before[rank] - center))).max() < 1e-14
    assert numpy.abs(after + sum(x for x, _ in results) - center - sum(before)).max() < 1e-13


def outer(lr: float, momentum: float, pieces: int, overlap: int, keep_local: float, steps: int) -> Any:
    """Each step moves every value of replica r by r + 1; models after each step."""
    values, world = replica(0), dist.group.WORLD
    assert world is not None
    fragments = [values] if pieces == 1 else [values[:1], values[1:]]
    strategy = DiLoCo(
        fragments, world, 4, lr=lr, momentum=momentum, overlap=overlap, keep_local=keep_local
    )  # fmt: skip
    history = []
    for step in range(1, steps + 1):
        for value in values:
            value.add_(dist.get_rank() + 1.0)
        strategy.count(1 + dist.get_rank())
        strategy.after(step)
        history.append((whole(values), whole(strategy.model())))
    return history


def test_diloco(ranks: Ranks) -> None:
    start = whole(replica(0))
    mean_of_period = 4 * (1 * 1 + 2 * 2) / 3  # tokens 1:2, steps of 1 and 2
    plain = ranks(2).run(outer, 1.0, 0.0, 1, 0, 0.0, 4)
    assert numpy.abs(plain[0][-1][0] - (start + mean_of_period)).max() < 1e-13  # local SGD
    assert numpy.array_equal(plain[0][2][1], start)  # the shared model waits for the meeting
    nesterov = ranks(2).run(outer, 0.7, 0.9, 1, 0, 0.0, 8)
    # Two equal outer gradients d: b = d, then 1.9 d; t moves by lr (d + 0.9 b) each time.
    moved = 0.7 * mean_of_period * ((1 + 0.9) + (1 + 0.9 * 1.9))
    for history in nesterov:
        assert numpy.abs(history[-1][0] - (start + moved)).max() < 1e-12
        assert numpy.array_equal(history[-1][0], nesterov[0][-1][0])


def test_streaming_fragments(ranks: Ranks) -> None:
    start = whole(replica(0))
    results = ranks(2).run(outer, 1.0, 0.0, 2, 1, 0.5, 4)
    for rank, history in enumerate(results):
        # The first fragment is sent after step 1, taken in after step 2, and half of what is local stays.
        shared = start[:12] + (1 + 4) / 3
        assert numpy.abs(history[1][1][:12] - shared).max() < 1e-14
        assert numpy.abs(history[1][0][:12] - (0.5 * shared + 0.5 * (start[:12] + 2 * (rank + 1)))).max() < 1e-14
        assert numpy.array_equal(history[1][1][12:], start[12:])
        # The second after steps 3 and 4.
        assert numpy.abs(history[3][1][12:] - (start[12:] + 3 * 5 / 3)).max() < 1e-14
