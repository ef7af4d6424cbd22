"""Every way to spread state over data-parallel ranks trains as one process does, and sends what it says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright.comm.operations as operations
import meshwright.parallel.buckets as buckets
import meshwright.parallel.reducing as reducing
import meshwright.parallel.shard as shard
from meshwright.comm.mesh import Mesh
from meshwright.job.layout import Layout
from meshwright.job.model_spec import ModelSpec
from meshwright.model.initialise import initialise
from meshwright.model.transformer import StageModel
from meshwright.parallel.data_parallel import make_data_parallel
from meshwright.parallel.owned import DataParallel
from meshwright.parallel.replicate import BucketedDataParallel
from meshwright.prove.pool import RankFailure, RankPool
from meshwright.train.optimizer import make_optimizer

Ranks = Callable[[int], RankPool]

LAYOUTS = [
    *(Layout(dp=2, zero=zero) for zero in (0, 1, 2, 3)),
    *(Layout(dp=4, zero=zero) for zero in (0, 1, 2, 3)),
    *(Layout(dp=4, shard=2, zero=zero) for zero in (1, 2, 3)),
]
RATE, WIDTH = 0.05, 7


class Net(nn.Module):
    """Odd sizes, a tied matrix, a parameter nobody uses and one that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 13)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 13, bias=False)) for _ in range(3)
        )
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Parameter(torch.randn(5, WIDTH))
        self.last = nn.Linear(13, WIDTH)

    def forward(self, rows: Tensor, number: int) -> Tensor:
        """The sum over rows of a loss."""
        hidden = self.first(rows)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        hidden = self.last(hidden)
        if number % 3 == 1:
            hidden = hidden + (hidden @ self.sometimes.t()) @ self.sometimes
        return (hidden @ self.first.weight.t()).square().sum()


def net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def rows_of(step: int, number: int) -> Tensor:
    """Micro-batch ``number`` of a step: very unequal numbers of rows, also none."""
    count = (1, 9, 0, 4, 2)[(step + number) % 5]
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1000 * step + number)).double()


def divisor(step: int, numbers: range) -> float:
    """Rows of the global batch."""
    return float(sum(len(rows_of(step, number)) for number in numbers))


@contextmanager
def distributed(layout: Layout, module: nn.Module, **options: Any) -> Iterator[DataParallel]:
    with Mesh(layout) as mesh:
        options = {"dtype": torch.float64, "bucket_bytes": 900} | options
        yield make_data_parallel({0: module}, layout=layout, mesh=mesh, **options)


def run_step(
    data_parallel: DataParallel, module: nn.Module, step: int, micro_steps: int, degree: int, announce: bool = True
) -> None:
    total = divisor(step, range(micro_steps * degree))
    data_parallel.begin_step()
    for index in range(micro_steps):
        number = index * degree + dist.get_rank()
        if announce:
            with data_parallel.micro_batch(last=index == micro_steps - 1):
                (module(rows_of(step, number), number) / total).backward()
        else:
            (module(rows_of(step, number), number) / total).backward()
    data_parallel.finish_gradients()


def train(
    layout: Layout, micro_steps: int, steps: int, deterministic: bool, announce: bool = True
) -> list[list[tuple[str, int, bool, Any, Any]]]:
    """SGD; of each step this rank's (name, start, counted, gradient, new value)."""
    module = net()
    history = []
    with distributed(layout, module, deterministic=deterministic) as data_parallel:
        owned = data_parallel.owned()
        for step in range(steps):
            run_step(data_parallel, module, step, micro_steps, layout.dp, announce)
            for piece in owned:
                piece.master.sub_(piece.gradient, alpha=RATE)
            data_parallel.publish()
            history.append(
                [(piece.name, piece.start, piece.counted, copy(piece.gradient), copy(piece.master)) for piece in owned]
            )
    return history


def copy(tensor: Tensor) -> Any:
    """As an array: results of ranks travel as plain bytes."""
    return numpy.array(tensor.detach().numpy())


def plain(micro_batches: int, steps: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The same in one process with no library: (gradients, new values) of each step, flattened."""
    module = net()
    history = []
    for step in range(steps):
        module.zero_grad()
        total = divisor(step, range(micro_batches))
        for number in range(micro_batches):
            (module(rows_of(step, number), number) / total).backward()
        gradients = {
            name: torch.zeros_like(parameter).view(-1) if parameter.grad is None else parameter.grad.clone().view(-1)
            for name, parameter in module.named_parameters()
        }
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.view(-1).sub_(gradients[name], alpha=RATE)
        values = {name: parameter.detach().clone().view(-1) for name, parameter in module.named_parameters()}
        history.append((gradients, values))
    return history


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_trains_as_one_process(ranks: Ranks, layout: Layout, micro_steps: int, deterministic: bool) -> None:
    steps = 3
    by_rank = ranks(layout.ranks).run(train, layout, micro_steps, steps, deterministic)
    expected = plain(micro_steps * layout.dp, steps)
    for step, (gradients, values) in enumerate(expected):
        counted = {name: torch.zeros(value.numel(), dtype=torch.int64) for name, value in values.items()}
        for pieces in (history[step] for history in by_rank):
            for name, start, counts, gradient, value in pieces:
                stop = start + value.size
                scale = max(1.0, float(gradients[name].abs().max()))
                assert abs(gradient - gradients[name][start:stop].numpy()).max() <= 1e-12 * scale
                assert abs(value - values[name][start:stop].numpy()).max() <= 1e-12
                counted[name][start:stop] += counts
        assert all(bool((count == 1).all()) for count in counted.values()), "not every element is counted once"


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=3)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_needs_no_announcement(ranks: Ranks, layout: Layout, deterministic: bool) -> None:
    announced = ranks(2).run(train, layout, 2, 2, deterministic)
    silent = ranks(2).run(train, layout, 2, 2, deterministic, False)
    for one, other in zip(announced, silent, strict=True):
        for pieces, others in zip(one, other, strict=True):
            assert all(numpy.array_equal(mine[-1], theirs[-1]) for mine, theirs in zip(pieces, others, strict=True))


# -- bits that do not depend on dp ------------------------------------------------------------------

SPEC = ModelSpec(vocabulary=61, hidden=24, layers=2, heads=4, kv_heads=2, ffn_hidden=40, tied=True)
SEQUENCE = 10


def sentence(number: int) -> Any:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, SPEC.vocabulary, (1, SEQUENCE), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, (3 * number) % SEQUENCE :] = -100
    return SimpleNamespace(
        tokens=tokens, labels=labels, positions=torch.arange(SEQUENCE)[None], documents=None, examples=torch.tensor([0])
    )


def fingerprint(layout: Layout, dtype: torch.dtype, global_batch: int) -> dict[str, Any]:
    """Five AdamW steps; the masters of each range, by name and place."""
    module = StageModel(SPEC, range(SPEC.layers), True, True)
    initialise(module, 3)
    with distributed(layout, module, dtype=dtype, deterministic=True, bucket_bytes=9000) as data_parallel:
        owned = data_parallel.owned()
        optimizer = make_optimizer(owned, name="adamw", betas=(0.9, 0.95), eps=1e-8, momentum=0.0, weight_decay=0.1)
        for step in range(5):
            data_parallel.begin_step()
            micro_steps = -(-global_batch // layout.dp)
            for index in range(micro_steps):
                batch = sentence(100 * step + index * layout.dp + dist.get_rank())
                with data_parallel.micro_batch(last=index == micro_steps - 1):
                    module(None, batch, 17.0).backward()
            data_parallel.finish_gradients()
            optimizer.step(3e-3)
            data_parallel.publish()
        return {f"{piece.name}+{piece.start}": copy(piece.master) for piece in owned}


def digest(by_rank: list[dict[str, Any]]) -> dict[str, str]:
    """Whole parameters from the ranges of all ranks (copies must agree), as digests of their bits."""
    sizes: dict[str, int] = {}
    for pieces in by_rank:
        for place, values in pieces.items():
            name, _, start = place.rpartition("+")
            sizes[name] = max(sizes.get(name, 0), int(start) + values.size)
    whole = {name: numpy.full(size, numpy.nan, numpy.float32) for name, size in sizes.items()}
    for pieces in by_rank:
        for place, values in pieces.items():
            name, _, start = place.rpartition("+")
            target = whole[name][int(start) : int(start) + values.size]
            assert (numpy.isnan(target) | (target == values)).all(), f"copies of {name} differ"
            target[:] = values
    assert not any(numpy.isnan(values).any() for values in whole.values())
    return {name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in whole.items()}


@pytest.mark.all  # of the parts; of the whole trainer: test_determinism.py
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dp_and_zero_change_no_bit(ranks: Ranks, dtype: torch.dtype) -> None:
    batch = 8
    reference = digest(ranks(1).run(fingerprint, Layout(), dtype, batch))
    assert len(reference) > 5
    for layout in LAYOUTS:
        found = digest(ranks(layout.ranks).run(fingerprint, layout, dtype, batch))
        assert found == reference, f"{layout} changes the bits of {[n for n in reference if found[n] != reference[n]]}"


# -- what is sent -------------------------------------------------------------------------------------


@contextmanager
def counted_calls() -> Iterator[list[tuple[str, int]]]:
    """Every collective that data parallelism starts: its name and the bytes of its larger side."""
    calls: list[tuple[str, int]] = []
    places = [
        (module, name)
        for module in (buckets, shard, reducing, operations)
        for name in ("reduce_scatter", "all_gather", "all_to_all")
        if hasattr(module, name)
    ]
    originals = {(module, name): getattr(module, name) for module, name in places}

    def watched(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: Tensor, input: Tensor, *rest: Any, **options: Any) -> Any:
            size = max(output.numel(), input.numel()) * input.element_size()
            calls.append((name, size))
            return operation(output, input, *rest, **options)

        return call

    for (module, name), operation in originals.items():
        setattr(module, name, watched(name, operation))
    try:
        yield calls
    finally:
        for (module, name), operation in originals.items():
            setattr(module, name, operation)


def sent(layout: Layout, micro_steps: int, deterministic: bool) -> tuple[dict[str, tuple[int, int]], list[int]]:
    """Of one step: calls and bytes by operation; and the sizes (elements) of the buckets or groups."""
    module = net()
    with distributed(layout, module, deterministic=deterministic) as data_parallel:
        run_step(data_parallel, module, 0, micro_steps, layout.dp)
        data_parallel.publish()
        with counted_calls() as calls:
            run_step(data_parallel, module, 1, micro_steps, layout.dp)
            data_parallel.publish()
        if isinstance(data_parallel, BucketedDataParallel):
            sizes = [bucket.size for bucket in data_parallel.buckets]
        else:
            assert isinstance(data_parallel, shard.ShardedDataParallel)
            reductions = [each for stage in data_parallel._reductions.values() for each in stage]
            sizes = [each._row * each.copies.shards for each in reductions]
    names = {name for name, _ in calls}
    return {
        name: (len([1 for each, _ in calls if each == name]), sum(size for each, size in calls if each == name))
        for name in names
    }, sizes


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_replicated_reduces_once_a_step(ranks: Ranks, micro_steps: int) -> None:
    found, sizes = ranks(2).run(sent, Layout(dp=2), micro_steps, False)[0]
    assert len(sizes) > 3
    assert found == {name: (len(sizes), 8 * sum(sizes)) for name in ("reduce_scatter", "all_gather")}


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_zero_1_reduces_once_a_step_and_gathers_parameters(ranks: Ranks, micro_steps: int) -> None:
    found, sizes = ranks(2).run(sent, Layout(dp=2, zero=1), micro_steps, False)[0]
    assert found == {name: (len(sizes), 8 * sum(sizes)) for name in ("reduce_scatter", "all_gather")}


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_zero_2_reduces_each_micro_step_and_gathers_once(ranks: Ranks, micro_steps: int) -> None:
    found, sizes = ranks(2).run(sent, Layout(dp=2, zero=2), micro_steps, False)[0]
    assert found["all_gather"] == (len(sizes), 8 * sum(sizes))
    assert found["reduce_scatter"] == (micro_steps * len(sizes), 8 * micro_steps * sum(sizes))


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_zero_3_gathers_blocks_twice_but_the_last(ranks: Ranks, micro_steps: int) -> None:
    found, sizes = ranks(2).run(sent, Layout(dp=2, zero=3), micro_steps, False)[0]
    *blocks, last, root = sizes
    gathered = 2 * sum(blocks) + last + root
    assert found["all_gather"] == (micro_steps * (2 * len(blocks) + 2), 8 * micro_steps * gathered)
    assert found["reduce_scatter"] == (micro_steps * len(sizes), 8 * micro_steps * sum(sizes))


def test_copies_of_shards_are_summed_once_a_step(ranks: Ranks) -> None:
    layout = Layout(dp=4, shard=2, zero=2)
    found, sizes = ranks(4).run(sent, layout, 4, False)[0]
    assert found["reduce_scatter"][0] == 4 * len(sizes) + len(sizes)
    assert found["all_gather"][0] == 2 * len(sizes)


def test_deterministic_mode_exchanges_every_micro_step(ranks: Ranks) -> None:
    found, sizes = ranks(2).run(sent, Layout(dp=2), 4, True)[0]
    assert found == {"all_to_all": (4 * len(sizes), 32 * sum(sizes)), "all_gather": (len(sizes), 8 * sum(sizes))}


# -- ranges, names, misuse ----------------------------------------------------------------------------


def owned_of(layout: Layout, spec: ModelSpec, dtype: torch.dtype) -> list[tuple[str, int, int, bool, bool, bool]]:
    from meshwright.parallel.tensor import TensorPartition

    with Mesh(layout) as mesh:
        partition = TensorPartition(mesh) if layout.tp > 1 else None
        stages = {}
        for stage in layout.stages_of(mesh.coordinate("pp")):
            module = StageModel(
                spec, layout.stage_layers(spec.layers)[stage], stage == 0, stage == layout.stage_count - 1, partition
            )
            initialise(module, 0)
            stages[stage] = module
        data_parallel = make_data_parallel(
            stages, layout=layout, mesh=mesh, dtype=dtype, bucket_bytes=8000, tied_apart=spec.tied and layout.pp > 1
        )
        return [
            (piece.parameter, piece.start, piece.count, piece.decay, piece.counted, piece.tp_replicated)
            for piece in data_parallel.owned()
        ]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, tp=2, zero=1),
        Layout(dp=2, tp=2, zero=3),
        Layout(dp=2, pp=2, zero=0),
        Layout(dp=2, pp=2, zero=1),
        Layout(dp=2, pp=2, zero=3),
        Layout(dp=4, shard=2, zero=1),
        Layout(dp=4, shard=2, zero=3),
    ],
    ids=str,
)
def test_each_element_of_the_model_is_counted_once(ranks: Ranks, layout: Layout) -> None:
    tied = layout.tp == 1
    spec = SPEC.model_copy(update={"tied": tied, "vocabulary": 64})
    by_rank = ranks(layout.ranks).run(owned_of, layout, spec, torch.bfloat16)
    counted = sum(count for pieces in by_rank for _, _, count, _, counts, _ in pieces if counts)
    assert counted == spec.parameter_count
    if layout.pp > 1:
        first = {(start, count) for pieces in by_rank for name, start, count, *_ in pieces if "embedding" in name}
        last = {(start, count) for pieces in by_rank for name, start, count, *_ in pieces if "head" in name}
        assert first == last, "the two copies of the tied embedding are divided differently"
    for pieces in by_rank:
        for name, _, _, decay, counts, whole in pieces:
            assert decay is not ("norm" in name or "bias" in name)
            assert whole is ("norm" in name)
            assert not (counts and "head.weight" in name and tied)


def split_pass(layout: Layout) -> list[tuple[str, int, Any]]:
    """Gradients set in ``.grad`` by hand, as the weight part of a split backward pass does."""
    module = net()
    with distributed(layout, module) as data_parallel:
        data_parallel.begin_step()
        for index in range(2):
            number = 2 * index + dist.get_rank()
            with data_parallel.micro_batch(last=index == 1, stage=0, part="input"):
                pass
            with data_parallel.micro_batch(last=index == 1, stage=0, part="weight"):
                parameters = list(module.parameters())
                loss = module(rows_of(0, number), number) / divisor(0, range(4))
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                data_parallel.collect(0)
        data_parallel.finish_gradients()
        return [(piece.name, piece.start, copy(piece.gradient)) for piece in data_parallel.owned()]


@pytest.mark.parametrize("zero", [0, 1])
def test_takes_gradients_that_called_no_hook(ranks: Ranks, zero: int) -> None:
    gradients, _ = plain(4, 1)[0]
    for pieces in ranks(2).run(split_pass, Layout(dp=2, zero=zero)):
        for name, start, gradient in pieces:
            assert abs(gradient - gradients[name][start : start + gradient.size].numpy()).max() <= 1e-12


def beside_an_empty_stage(layout: Layout) -> list[Any]:
    module = net()
    with Mesh(layout) as mesh:
        stages = {0: module, 1: nn.Identity()}
        data_parallel = make_data_parallel(stages, layout=layout, mesh=mesh, dtype=torch.float64)
        run_step(data_parallel, module, 0, 1, layout.dp)
        data_parallel.publish()
        return [piece.parameter for piece in data_parallel.owned()]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_may_hold_nothing(ranks: Ranks, zero: int) -> None:
    for names in ranks(2).run(beside_an_empty_stage, Layout(dp=2, zero=zero)):
        assert names and all(name.startswith("stage0:") for name in names)


def announce_the_end_too_early(layout: Layout) -> None:
    module = net()
    with distributed(layout, module) as data_parallel:
        data_parallel.begin_step()
        for _ in range(2):
            with data_parallel.micro_batch(last=True):
                module(rows_of(0, 1), 1).backward()


def test_refuses_a_gradient_after_the_last(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="came after its bucket had been reduced"):
        ranks(2).run(announce_the_end_too_early, Layout(dp=2))
