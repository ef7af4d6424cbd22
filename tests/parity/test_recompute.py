"""Recomputing activations changes memory, never a bit: alone, with tensor parallel, sharded and in pipelines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.comm import phase as phases
from meshwright.comm.mesh import Mesh
from meshwright.comm.record import TrafficRecorder
from meshwright.data.batch import Batch
from meshwright.job.layout import Layout, Recompute
from meshwright.job.model_spec import ModelSpec
from meshwright.model.dropout import Randomness
from meshwright.model.initialise import initialise
from meshwright.model.partition import Partition
from meshwright.model.transformer import StageModel
from meshwright.parallel.data_parallel import make_data_parallel
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.tensor import TensorPartition
from meshwright.prove.pool import RankPool

POLICIES: tuple[Recompute, ...] = ("selective", "full")
PLAIN = ModelSpec(vocabulary=29, hidden=32, layers=4, heads=4, kv_heads=2, ffn_hidden=48, init_std=0.2)
DROPOUT = PLAIN.model_copy(update={"dropout": 0.2, "attention_dropout": 0.3})
HEAD_NORMS = PLAIN.model_copy(update={"qk_norm": True})
ROWS, SEQUENCE = 2, 12

Ranks = Callable[[int], RankPool]


def batches_of(count: int) -> list[Batch]:
    batches = []
    for number in range(count):
        tokens = torch.randint(29, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(number))
        positions = torch.arange(SEQUENCE).repeat(ROWS, 1)
        documents = (positions > 4 + number).long()
        batches.append(Batch(tokens, tokens.roll(-1, 1), positions, documents, torch.arange(ROWS) + ROWS * number))
    return batches


def built(
    spec: ModelSpec, policy: Recompute, dtype: torch.dtype, partition: Partition | None = None,
    layers: range | None = None, first: bool = True, last: bool = True,
) -> StageModel:  # fmt: skip
    model = StageModel(spec, range(spec.layers) if layers is None else layers, first, last, partition).to(dtype)
    initialise(model, 3)
    model.randomness = Randomness(1, 2)
    apply_recompute(model, policy)
    return model


def outcome(model: StageModel) -> dict[str, Tensor]:
    """The loss and every gradient of one step."""
    loss = model.loss(None, batches_of(1)[0], 7.0)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [PLAIN, DROPOUT, HEAD_NORMS], ids=["plain", "dropout", "head norms"])
def test_one_device_is_equal_to_the_last_bit(spec: ModelSpec, dtype: torch.dtype) -> None:
    reference = built(spec, "none", dtype)
    expected = outcome(reference)
    for policy in POLICIES:
        model = built(spec, policy, dtype)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
        assert same_bits(outcome(model), expected)


def kept_bytes(policy: Recompute) -> int:
    """Bytes of the distinct activations alive between forward and backward."""
    model = built(PLAIN, policy, torch.float32)
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss(None, batches_of(1)[0], 7.0)
    assert loss.requires_grad
    return sum(storages.values())


def test_policies_keep_less_and_less() -> None:
    none, selective, full = (kept_bytes(policy) for policy in ("none", "selective", "full"))
    assert full < selective < none


@pytest.mark.parametrize(("policy", "times"), [("none", 0), ("selective", 4), ("full", 4)])
def test_each_layer_is_recomputed_once(monkeypatch: pytest.MonkeyPatch, policy: Recompute, times: int) -> None:
    entered: Counter[str] = Counter()
    inner = phases.phase

    def counted(name: str) -> Any:
        entered[name] += 1
        return inner(name)

    monkeypatch.setattr("meshwright.parallel.recompute.phase", counted)
    model = built(PLAIN, policy, torch.float32)
    with torch.no_grad():
        model.loss(None, batches_of(1)[0], 7.0)
    assert entered["recompute"] == 0
    outcome(model)
    assert entered["recompute"] == times


# -- on several ranks ----------------------------------------------------------------------------------


def recorded(model: StageModel, mesh: Mesh) -> tuple[dict[str, Tensor], TrafficRecorder]:
    with TrafficRecorder(mesh.axis_of) as recorder:
        found = outcome(model)
    return found, recorder


def with_tensor_parallel(spec: ModelSpec) -> list[dict[str, int]]:
    """By policy: messages of tensor parallel collectives in the recompute phase."""
    messages = []
    with Mesh(Layout(tp=2)) as mesh:
        expected = outcome(built(spec, "none", torch.float32, TensorPartition(mesh)))
        for policy in POLICIES:
            model = built(spec, policy, torch.float32, TensorPartition(mesh))
            found, recorder = recorded(model, mesh)
            assert same_bits(found, expected)
            _, alone = recorded(built(spec, policy, torch.float32), mesh)
            assert 2 * recorder.computes.recompute == alone.computes.recompute > 0
            counts: Counter[str] = Counter()
            for send in recorder.sends:
                if send.phase == "recompute":
                    counts[f"{send.axis} {send.operation}"] += send.messages
            messages.append(dict(counts))
    return messages


@pytest.mark.parametrize("spec", [PLAIN, DROPOUT], ids=["plain", "dropout"])
def test_tensor_parallel_communicates_again_only_where_it_must(ranks: Ranks, spec: ModelSpec) -> None:
    for selective, full in ranks(2).run(with_tensor_parallel, spec):
        assert selective == {}
        # two gathers and one scatter a layer: nobody needs the last product again, unless dropout comes after it
        scatters = 2 if spec.dropout else 1
        assert full == {"tp all_gather": 2 * spec.layers, "tp reduce_scatter": scatters * spec.layers}


def sharded(layout: Layout) -> list[bool]:
    """Gradients of three steps' worth of micro-batches under ZeRO, each policy against none."""
    results = []
    for policy in ("none", *POLICIES):
        with Mesh(layout) as mesh:
            partition = TensorPartition(mesh) if layout.tp > 1 else None
            model = built(DROPOUT, policy, torch.float32, partition)
            data_parallel = make_data_parallel({0: model}, layout=layout, mesh=mesh, dtype=torch.float32)
            losses = []
            for _ in range(2):
                data_parallel.begin_step()
                for batch in batches_of(4)[mesh.coordinate("dp") :: layout.dp]:
                    with data_parallel.micro_batch(last=batch.examples[0] >= 4):
                        loss = model(None, batch, 7.0)
                        loss.backward()
                    losses.append(loss.detach())
                data_parallel.finish_gradients()
            gradients = {f"{piece.parameter}:{piece.start}": piece.gradient.clone() for piece in data_parallel.owned()}
            results.append({"loss": torch.stack(losses), **gradients})
    return [same_bits(result, results[0]) for result in results[1:]]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallel_of_every_kind(ranks: Ranks, zero: int) -> None:
    assert ranks(2).run(sharded, Layout(dp=2, zero=zero)) == [[True, True]] * 2


def test_sharded_and_tensor_parallel_together(ranks: Ranks) -> None:
    assert ranks(4).run(sharded, Layout(dp=2, tp=2, zero=3)) == [[True, True]] * 4


def pipelined(layout: Layout, spec: ModelSpec) -> list[bool]:
    results = []
    device = torch.device("cpu")
    for recompute in ("none", *POLICIES, tuple(("full", "none", "selective", "none")[: layout.stage_count])):
        chosen = layout.model_copy(update={"recompute": recompute})
        with Mesh(chosen) as mesh:
            partition = TensorPartition(mesh) if layout.tp > 1 else None
            layers = chosen.stage_layers(spec.layers)
            stages = {
                stage: built(
                    spec, chosen.stage_recompute(stage), torch.float32, partition, layers[stage],
                    stage == 0, stage == chosen.stage_count - 1,
                )
                for stage in chosen.stages_of(mesh.coordinate("pp"))
            }  # fmt: skip
            data_parallel = make_data_parallel(stages, layout=chosen, mesh=mesh, dtype=torch.float32)
            executor = PipelineExecutor(stages, data_parallel, mesh, chosen, spec, torch.float32, device)
            data_parallel.begin_step()
            losses = executor.run(batches_of(8)[mesh.coordinate("dp") :: layout.dp], 7.0)
            data_parallel.finish_gradients()
            gradients = {f"{piece.parameter}:{piece.start}": piece.gradient.clone() for piece in data_parallel.owned()}
            known = [loss for loss in losses if loss is not None]
            results.append({"loss": torch.stack(known) if known else torch.zeros(1), **gradients})
    return [same_bits(result, results[0]) for result in results[1:]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("spec", [DROPOUT, HEAD_NORMS], ids=["dropout", "head norms"])
def test_pipelines_and_policies_by_stage(ranks: Ranks, schedule: str, spec: ModelSpec) -> None:
    assert ranks(2).run(pipelined, Layout(pp=2, schedule=schedule), spec) == [[True] * 3] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_pipelines_with_sharding_and_tensor_parallel(ranks: Ranks, schedule: str) -> None:
    for layout in (Layout(pp=2, dp=2, zero=3, schedule=schedule), Layout(pp=2, tp=2, schedule=schedule)):
        assert ranks(4).run(pipelined, layout, DROPOUT) == [[True] * 3] * 4
