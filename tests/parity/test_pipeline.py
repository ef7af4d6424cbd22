"""Pipeline schedules against one device: losses, gradients, tied embeddings, sharded state, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch
from meshwright.errors import InputError
from meshwright.job.layout import SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES, Layout
from meshwright.job.model_spec import ModelSpec
from meshwright.job.schedule_rules import micro_batch_rule
from meshwright.model.initialise import initialise
from meshwright.model.transformer import StageModel
from meshwright.parallel.data_parallel import make_data_parallel
from meshwright.parallel.owned import BackwardPart
from meshwright.parallel.pipeline import SCHEDULE_CLASSES, PipelineExecutor
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.tensor import TensorPartition
from meshwright.parallel.tied import combine_tied_gradients, tied_difference
from meshwright.prove.pool import RankPool

SCHEDULES = tuple(SCHEDULE_CLASSES)
CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {"kv_heads": 1}
GPT2: dict[str, Any] = {
    "norm": "layernorm", "positions": "learned", "gated": False, "activation": "gelu_tanh",
    "qkv_bias": True, "output_bias": True, "mlp_bias": True, "max_positions": 8,
}  # fmt: skip


def model_spec(layers: int, **options: Any) -> ModelSpec:
    return ModelSpec(vocabulary=19, hidden=8, layers=layers, heads=2, ffn_hidden=12, init_std=0.3, **options)


def unequal_batches(count: int) -> list[Batch]:
    """From all labels valid to a single one, and one micro-batch without any."""
    generator = torch.Generator().manual_seed(count)
    batches = []
    for index in range(count):
        tokens = torch.randint(0, 19, (2, 4), generator=generator)
        labels = torch.randint(0, 19, (2, 4), generator=generator)
        labels.view(-1)[8 - index % 8 :] = -100
        if index == 1:
            labels[:] = -100
        positions = torch.arange(4).expand(2, 4).contiguous()
        documents = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
        batches.append(Batch(tokens, labels, positions, documents, torch.arange(2) + 2 * index))
    return batches


def one_device(spec: ModelSpec) -> StageModel:
    module = StageModel(spec, range(spec.layers), True, True).to(torch.float64)
    initialise(module, 5)
    return module


def stage_modules(spec: ModelSpec, layout: Layout, mesh: Mesh) -> dict[int, StageModel]:
    layers = layout.stage_layers(spec.layers)
    stages = {}
    for stage in layout.stages_of(mesh.coordinate("pp")):
        module = StageModel(spec, layers[stage], stage == 0, stage == layout.stage_count - 1).to(torch.float64)
        initialise(module, 5)
        apply_recompute(module, layout.stage_recompute(stage))
        stages[stage] = module
    return stages


def uneven(layout: Layout) -> Layout:
    """The same layout with 0 layers on the first stage, 3 on the second, 2 on the last, 1 on the others."""
    counts = [1] * layout.stage_count
    counts[0], counts[1] = 0, 3
    counts[-1] = 2
    return layout.model_copy(update={"stages": tuple(counts)})


class LocalGradients:
    """Data parallelism of one rank: gradients stay in ``.grad``; keeps a record of what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, BackwardPart, bool]] = []
        self.look: Callable[[], None] = lambda: None

    @contextmanager
    def micro_batch(self, *, last: bool, stage: int | None = None, part: BackwardPart = "whole") -> Iterator[None]:
        assert stage is not None
        self.told.append((stage, part, last))
        self.look()
        yield

    def collect(self, stage: int) -> None:
        assert self.told[-1][:2] == (stage, "weight")


def difference(found: Tensor, expected: Tensor, norm: float) -> float:
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-6 * norm)


def reference_step(module: StageModel, batches: list[Batch], divisor: float) -> tuple[list[float], float]:
    """Losses and gradient norm of one device; gradients are left in ``.grad``."""
    module.zero_grad()
    losses = []
    for batch in batches:
        loss = module.loss(None, batch, divisor)
        loss.backward()
        losses.append(float(loss.detach()))
    squares = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
    return losses, math.sqrt(squares)


def logical(module: StageModel, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full names to values, from physical ones."""
    return {segment.name: segment.box(values[name]) for name, boxes in module.segments.items() for segment in boxes}


# -- every schedule on its own ------------------------------------------------------------------------


def steps_of_a_schedule(layout: Layout, options: dict[str, Any], counts: tuple[int, ...]) -> dict[str, Any]:
    """Two training steps with an evaluation between them, for each number of micro-batches."""
    spec = model_spec(sum(layout.stages or (1,) * layout.stage_count), **options)
    report: dict[str, Any] = {"worst": 0.0, "told": {}}
    with Mesh(layout) as mesh:
        stages = stage_modules(spec, layout, mesh)
        data_parallel = LocalGradients()
        executor = PipelineExecutor(stages, data_parallel, mesh, layout, spec, torch.float64, CPU)
        whole = one_device(spec)
        holds_last = layout.stage_count - 1 in stages
        for count in counts:
            batches = unequal_batches(count)
            divisor = float(sum(batch.valid_tokens for batch in batches))
            expected, norm = reference_step(whole, batches, divisor)
            gradients = logical(whole, {n: p.grad for n, p in whole.named_parameters() if p.grad is not None})
            for _ in range(2):
                data_parallel.told.clear()
                for module in stages.values():
                    module.zero_grad()
                losses = executor.run(batches, divisor)
                evaluated = executor.evaluate(batches[: count - 1] + batches, divisor)
                for found, wanted in ((losses, expected), (evaluated, expected[: count - 1] + expected)):
                    if holds_last:
                        report["worst"] = max(
                            report["worst"], *(abs(float(a) - b) for a, b in zip(found, wanted, strict=True))
                        )
                    else:
                        assert found == [None] * len(wanted)
                for module in stages.values():
                    assert module.training
                    mine = logical(module, {n: p.grad for n, p in module.named_parameters() if p.grad is not None})
                    for name, gradient in mine.items():
                        wanted = gradients[name]
                        report["worst"] = max(report["worst"], difference(gradient, wanted, norm))
                    assert len(mine) == sum(len(boxes) for boxes in module.segments.values())
            report["told"][count] = list(data_parallel.told)
            report["left"] = sum(
                receive.buffer is not None
                for stage in next(iter(executor._prepared.values()))[1]
                for receives in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
                for receive in receives
            )
    return report


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_schedule_equals_one_device(ranks: Callable[[int], RankPool], pp: int, schedule: str) -> None:
    layout = uneven(Layout(pp=pp, schedule=schedule))
    counts = (2 * pp,) if schedule == "dualpipev" else (pp, 2 * pp)
    options = GPT2 if pp == 2 else LLAMA
    placement = tuple(reversed(range(pp))) if pp == 2 else (2, 0, 3, 1)
    for chosen in (layout, layout.model_copy(update={"placement": placement})):
        reports = ranks(pp).run(steps_of_a_schedule, chosen, options, counts)
        for report in reports:
            assert report["worst"] <= 1e-12
            assert report["left"] == 0
            for count, told in report["told"].items():
                for stage in {stage for stage, _, _ in told}:
                    ends = [last for number, part, last in told if number == stage and part != "input"]
                    assert ends == [False] * (count - 1) + [True]
        parts = {part for report in reports for told in report["told"].values() for _, part, _ in told}
        assert ("weight" in parts) == (schedule in SPLIT_BACKWARD_SCHEDULES)


def many_sizes(schedule: str, pp: int, most: int) -> list[str]:
    """Up to 6 micro-batches and ``most`` stages a rank: runs right, or the sentence that refuses it."""
    wrong = []
    with Mesh(Layout(pp=pp, schedule=schedule)) as mesh:
        for virtual, count in product(range(1, most + 1), range(1, 7)):
            layout = Layout(pp=pp, schedule=schedule, virtual=virtual)
            spec = model_spec(layout.stage_count, **LLAMA)
            refused = micro_batch_rule(schedule, pp, virtual, count)
            if schedule in V_SCHEDULES and virtual != 2:
                continue  # such a layout has no stages to build
            stages = stage_modules(spec, layout, mesh)
            executor = PipelineExecutor(stages, LocalGradients(), mesh, layout, spec, torch.float64, CPU)
            batches = unequal_batches(count)
            try:
                executor.run(batches, 7.0)
            except InputError as error:
                if str(error) != refused:
                    wrong.append(f"virtual={virtual} micro-batches={count}: {error} instead of {refused}")
                continue
            if refused:
                wrong.append(f"virtual={virtual} micro-batches={count}: ran although {refused}")
            whole = one_device(spec)
            _, norm = reference_step(whole, batches, 7.0)
            gradients = dict(whole.named_parameters())
            for module in stages.values():
                for name, parameter in module.named_parameters():
                    assert parameter.grad is not None
                    expected = gradients[name].grad
                    assert expected is not None
                    if difference(parameter.grad, expected, norm) > 1e-12:
                        wrong.append(f"virtual={virtual} micro-batches={count}: gradient of {name}")
    return wrong


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sizes_on_three_ranks(ranks: Callable[[int], RankPool], schedule: str) -> None:
    assert ranks(3).run(many_sizes, schedule, 3, 2) == [[]] * 3


@pytest.mark.all
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("pp", "schedule"), list(product(range(2, 7), SCHEDULES)))
def test_every_size(ranks: Callable[[int], RankPool], pp: int, schedule: str) -> None:
    assert ranks(pp).run(many_sizes, schedule, pp, 6, timeout=580) == [[]] * pp


def boundary_buffers(layout: Layout, count: int) -> int:
    """The most receive buffers this rank held at the start of any backward pass."""
    spec = model_spec(layout.stage_count, **LLAMA)
    most = 0
    with Mesh(layout) as mesh:
        data_parallel = LocalGradients()
        executor = PipelineExecutor(
            stage_modules(spec, layout, mesh), data_parallel, mesh, layout, spec, torch.float64, CPU
        )

        def look() -> None:
            nonlocal most
            stages = next(iter(executor._prepared.values()))[1]
            held = sum(
                receive.buffer is not None
                for stage in stages
                for receives in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
                for receive in receives
            )
            most = max(most, held + sum(len(sends) for stage in stages for sends in stage._sends.values()))

        data_parallel.look = look
        executor.run(unequal_batches(count), 7.0)
    return most


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_boundary_tensors_do_not_grow_with_micro_batches(ranks: Callable[[int], RankPool], schedule: str) -> None:
    few, many = (max(ranks(2).run(boundary_buffers, Layout(pp=2, schedule=schedule), count)) for count in (24, 48))
    assert few == many


def shapes_differ() -> str:
    layout = Layout(pp=2)
    spec = model_spec(2)
    with Mesh(layout) as mesh:
        stages = stage_modules(spec, layout, mesh)
        executor = PipelineExecutor(stages, LocalGradients(), mesh, layout, spec, torch.float64, CPU)
        first, second = unequal_batches(2)
        short = Batch(
            *(getattr(second, field)[:1] for field in ("tokens", "labels", "positions", "documents", "examples"))
        )
        with pytest.raises(InputError) as caught:
            executor.run([first, short], 1.0)
        with pytest.raises(InputError, match="needs at least 2"):
            executor.run([first], 1.0)
    return str(caught.value)


def test_bad_micro_batches_are_refused(ranks: Callable[[int], RankPool]) -> None:
    for sentence in ranks(2).run(shapes_differ):
        assert sentence == "micro-batches: a pipeline step runs micro-batches of one shape, got [(1, 4), (2, 4)]"


# -- with data parallelism ----------------------------------------------------------------------------


def reduced_gradients(layout: Layout, options: dict[str, Any], deterministic: bool, count: int) -> dict[str, Any]:
    """Three steps on ``count`` micro-batches; the gradients of this rank's ranges against one device."""
    spec = model_spec(layout.stage_count + 1, **options)
    whole = one_device(spec)
    with Mesh(layout) as mesh:
        stages = stage_modules(spec, layout, mesh)
        tied_apart = spec.tied and layout.stage_count > 1
        data_parallel = make_data_parallel(
            stages, layout=layout, mesh=mesh, dtype=torch.float64, bucket_bytes=1500,
            deterministic=deterministic, tied_apart=tied_apart,
        )  # fmt: skip
        executor = PipelineExecutor(stages, data_parallel, mesh, layout, spec, torch.float64, CPU)
        batches = unequal_batches(count)
        divisor = float(sum(batch.valid_tokens for batch in batches))
        mine = batches[mesh.coordinate("dp") :: layout.dp]
        worst = squares = 0.0
        owned = data_parallel.owned()
        for step in range(3):
            _, norm = reference_step(whole, batches, divisor)
            expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
            data_parallel.begin_step()
            executor.run(mine, divisor)
            executor.evaluate(mine[:1], divisor)
            data_parallel.finish_gradients()
            if tied_apart:
                combine_tied_gradients(owned, mesh, layout)
            squares = 0.0
            for piece in owned:
                name = "embedding.weight" if spec.tied and piece.name == "head.weight" else piece.name
                wanted = expected[name]
                assert wanted is not None
                part = wanted.view(-1)[piece.start : piece.start + piece.count]
                scale = max(float(wanted.abs().max()), 1e-6 * norm)
                worst = max(worst, float((piece.gradient - part).abs().max()) / scale)
                squares += float(piece.gradient.square().sum()) if piece.counted else 0.0
                if step < 2:
                    piece.master.add_(piece.gradient, alpha=-0.5)
            data_parallel.publish()
            if step < 2:
                with torch.no_grad():
                    for parameter in whole.parameters():
                        assert parameter.grad is not None
                        parameter.add_(parameter.grad, alpha=-0.5)
        bits = {(piece.parameter, piece.start): piece.gradient.tolist() for piece in owned}
        return {"worst": worst, "squares": squares, "norm": norm, "bits": bits}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sharded_state_under_every_schedule(ranks: Callable[[int], RankPool], schedule: str, zero: int) -> None:
    layout = Layout(pp=2, dp=2, zero=zero, schedule=schedule)
    options = {**(GPT2 if zero % 2 else LLAMA), "tied": zero in (1, 2)}
    reports = ranks(4).run(reduced_gradients, layout, options, False, 8)
    assert max(report["worst"] for report in reports) <= 1e-12
    total = sum(report["squares"] for report in reports)
    assert math.sqrt(total) == pytest.approx(reports[0]["norm"], rel=1e-12)


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 0), ("looped-bfs", 1), ("zbv", 2), ("interleaved", 3)])
def test_deterministic_gradients_do_not_depend_on_dp(
    ranks: Callable[[int], RankPool], schedule: str, zero: int
) -> None:
    bits = []
    for dp in (1, 2):
        layout = Layout(pp=2, dp=dp, zero=zero, schedule=schedule)
        reports = ranks(2 * dp).run(reduced_gradients, layout, LLAMA, True, 8)
        assert max(report["worst"] for report in reports) <= 1e-12
        whole: dict[str, dict[int, list[float]]] = {}
        for report in reports:
            for (name, start), values in report["bits"].items():
                whole.setdefault(name, {})[start] = values
        bits.append({name: [x for start in sorted(parts) for x in parts[start]] for name, parts in whole.items()})
    assert bits[0] == bits[1]


@pytest.mark.parametrize(
    ("schedule", "zero", "qk_norm"), [("1f1b", 3, True), ("zero-bubble", 0, True), ("zbv", 3, False), ("zbv", 3, True)]
)
def test_recomputing_stages(ranks: Callable[[int], RankPool], schedule: str, zero: int, qk_norm: bool) -> None:
    policies = ("full", "selective") if schedule == "1f1b" else ("full", "selective", "none", "full")
    layout = Layout(pp=2, dp=2, zero=zero, schedule=schedule, recompute=policies)
    reports = ranks(4).run(reduced_gradients, layout, {**LLAMA, "qk_norm": qk_norm}, False, 8)
    assert max(report["worst"] for report in reports) <= 1e-12


def parts_of_a_recomputing_stage() -> list[tuple[int, BackwardPart, bool]]:
    layout = Layout(pp=2, schedule="zbv", recompute=("none", "full", "selective", "none"))
    spec = model_spec(4, **LLAMA)
    with Mesh(layout) as mesh:
        told = LocalGradients()
        PipelineExecutor(
            stage_modules(spec, layout, mesh), told, mesh, layout, spec, torch.float64, CPU
        ).run(unequal_batches(4), 7.0)  # fmt: skip
    return told.told


def test_a_recomputing_stage_is_not_split(ranks: Callable[[int], RankPool]) -> None:
    told = [entry for report in ranks(2).run(parts_of_a_recomputing_stage) for entry in report]
    assert [entry for entry in told if entry[0] == 1] == [(1, "whole", last) for last in (False, False, False, True)]
    assert {part for stage, part, _ in told if stage == 2} >= {"input", "weight"}


def tensor_parallel_stages(layout: Layout) -> float:
    """Gradients of this rank's boxes of every logical parameter against one device."""
    spec = model_spec(layout.stage_count, kv_heads=2, qk_norm=True)
    whole = one_device(spec)
    worst = 0.0
    with Mesh(layout) as mesh:
        partition, layers = TensorPartition(mesh), layout.stage_layers(spec.layers)
        last = layout.stage_count - 1
        stages = {}
        for stage in layout.stages_of(mesh.coordinate("pp")):
            stages[stage] = StageModel(spec, layers[stage], stage == 0, stage == last, partition).to(torch.float64)
            initialise(stages[stage], 5)
        executor = PipelineExecutor(stages, LocalGradients(), mesh, layout, spec, torch.float64, CPU)
        batches = unequal_batches(4)
        _, norm = reference_step(whole, batches, 7.0)
        expected = logical(whole, {n: p.grad for n, p in whole.named_parameters() if p.grad is not None})
        for _ in range(2):
            for module in stages.values():
                module.zero_grad()
            executor.run(batches, 7.0)
            for module in stages.values():
                for name, parameter in module.named_parameters():
                    assert parameter.grad is not None
                    if name in module.tp_replicated:
                        dist.all_reduce(parameter.grad, group=mesh.group("tp"))
                    for box in module.segments[name]:
                        worst = max(worst, difference(box.box(parameter.grad), box.cut(expected[box.name]), norm))
    return worst


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_tensor_parallelism(ranks: Callable[[int], RankPool], schedule: str) -> None:
    assert max(ranks(4).run(tensor_parallel_stages, Layout(pp=2, tp=2, schedule=schedule))) <= 1e-12


# -- tied embeddings ----------------------------------------------------------------------------------


def tied_training(layout: Layout, steps: int) -> dict[str, Any]:
    """SGD with momentum on a tied model; the copies' difference after every step, and the embedding."""
    spec = model_spec(4, tied=True, **LLAMA)
    whole = one_device(spec)
    momenta = {name: torch.zeros_like(parameter) for name, parameter in whole.named_parameters()}
    with Mesh(layout) as mesh:
        stages = stage_modules(spec, layout, mesh)
        data_parallel = make_data_parallel(stages, layout=layout, mesh=mesh, dtype=torch.float64, tied_apart=True)
        executor = PipelineExecutor(stages, data_parallel, mesh, layout, spec, torch.float64, CPU)
        owned = data_parallel.owned()
        mine = [torch.zeros_like(piece.master) for piece in owned]
        apart = worst = 0.0
        for step in range(steps):
            batches = unequal_batches(4 * layout.dp + step % 2 * 4 * layout.dp)
            divisor = float(sum(batch.valid_tokens for batch in batches))
            _, norm = reference_step(whole, batches, divisor)
            data_parallel.begin_step()
            executor.run(batches[mesh.coordinate("dp") :: layout.dp], divisor)
            data_parallel.finish_gradients()
            combine_tied_gradients(owned, mesh, layout)
            for piece, momentum in zip(owned, mine, strict=True):
                momentum.mul_(0.9).add_(piece.gradient)
                piece.master.sub_(momentum, alpha=0.05)
            data_parallel.publish()
            with torch.no_grad():
                for name, parameter in whole.named_parameters():
                    assert parameter.grad is not None
                    momenta[name].mul_(0.9).add_(parameter.grad)
                    parameter.sub_(momenta[name], alpha=0.05)
            apart = max(apart, tied_difference(owned, mesh, layout))
        expected = dict(whole.named_parameters())
        for piece in owned:
            wanted = expected["embedding.weight" if piece.name == "head.weight" else piece.name].detach()
            part = wanted.view(-1)[piece.start : piece.start + piece.count]
            worst = max(worst, float((piece.master - part).abs().max()) / float(wanted.abs().max()))
        copies = {piece.parameter for piece in owned if piece.name in ("embedding.weight", "head.weight")}
    return {"apart": apart, "worst": worst, "copies": copies, "norm": norm}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, Layout(pp=2, schedule="1f1b")),
        (2, Layout(pp=2, schedule="interleaved")),
        (2, Layout(pp=2, schedule="dualpipev")),
        (4, Layout(pp=4, schedule="gpipe")),
        (4, Layout(pp=2, dp=2, zero=1, schedule="1f1b")),
        (4, Layout(pp=2, dp=2, zero=3, schedule="zbv")),
        (4, Layout(pp=2, dp=2, zero=2, schedule="zero-bubble", placement=(3, 1, 2, 0))),
    ],
    ids=str,
)
def test_tied_copies_stay_equal(ranks: Callable[[int], RankPool], size: int, layout: Layout) -> None:
    reports = ranks(size).run(tied_training, layout, 20)
    assert [report["apart"] for report in reports] == [0.0] * size
    assert max(report["worst"] for report in reports) <= 1e-10
    held = set().union(*(report["copies"] for report in reports))
    assert held == {"stage0:embedding.weight", f"stage{layout.stage_count - 1}:head.weight"}


# -- stages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_on_one_stage(tied: bool) -> None:
    for layers, pp, virtual in [*product(range(1, 13), range(1, 5), (1, 2)), (30, 4, 1)]:
        layout = Layout(pp=pp, schedule="looped-bfs" if virtual > 1 else "1f1b", virtual=virtual)
        spec = model_spec(layers, tied=tied)
        ranges = layout.stage_layers(layers)
        last = layout.stage_count - 1
        with torch.device("meta"):
            modules = [StageModel(spec, part, stage == 0, stage == last) for stage, part in enumerate(ranges)]
        names = [box.name for module in modules for boxes in module.segments.values() for box in boxes]
        if tied and last > 0:
            names.remove("embedding.weight")  # the last stage's copy
        assert sorted(names) == sorted(name for name, _ in spec.parameters())
