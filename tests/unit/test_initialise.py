"""Initial values do not depend on the layout: slices, stages and the whole have the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.job.model_spec import ModelSpec
from meshwright.model.initialise import initialise
from meshwright.model.partition import Partition
from meshwright.model.transformer import StageModel

LLAMA = ModelSpec(
    vocabulary=97, hidden=36, layers=3, heads=4, kv_heads=4, head_size=6, ffn_hidden=44, qk_norm=True, qkv_bias=True
)
GPT2 = ModelSpec(
    vocabulary=97, hidden=32, layers=3, heads=4, ffn_hidden=64, max_positions=40, positions="learned", norm="layernorm",
    activation="gelu_tanh", gated=False, qkv_bias=True, output_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
SPECS = pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])


class Slice(Partition):
    def __init__(self, degree: int, index: int) -> None:
        self.degree, self.index = degree, index


def build(
    spec: ModelSpec, layers: range | None = None, first: bool = True, last: bool = True, degree: int = 1,
    index: int = 0, dtype: torch.dtype = torch.float64, seed: int = 11,
) -> StageModel:  # fmt: skip
    whole = range(spec.layers) if layers is None else layers
    model = StageModel(spec, whole, first, last, Slice(degree, index)).to(dtype)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    initialise(model, seed)
    return model


def logical(model: StageModel) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {s.name: s.box(parameters[fqn].detach()) for fqn, segments in model.segments.items() for s in segments}


def assemble(models: list[StageModel]) -> dict[str, Tensor]:
    """Whole logical tensors from every slice; fails where slices that overlap differ or leave a gap."""
    result: dict[str, Tensor] = {}
    for model in models:
        boxes = logical(model)
        for segments in model.segments.values():
            for segment in segments:
                whole = result.setdefault(segment.name, torch.full(segment.shape, float("nan"), dtype=torch.float64))
                place = segment.cut(whole)
                assert torch.equal(place.isnan(), torch.ones_like(place, dtype=torch.bool)) or torch.equal(
                    place, boxes[segment.name]
                )
                place.copy_(boxes[segment.name])
    return result


@SPECS
def test_parameters_and_segments_are_the_spec_s(spec: ModelSpec) -> None:
    model = build(spec)
    assert set(model.segments) == set(dict(model.named_parameters()))
    whole = logical(model)
    assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == dict(spec.parameters())
    covered = sum(segment.count for segments in model.segments.values() for segment in segments)
    assert covered == sum(parameter.numel() for parameter in model.parameters()) == spec.parameter_count


@SPECS
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_slices_are_the_whole(spec: ModelSpec, degree: int) -> None:
    whole = logical(build(spec))
    found = assemble([build(spec, degree=degree, index=index) for index in range(degree)])
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, found[name]), name


@SPECS
@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2), (0, 3)])
def test_stages_are_the_whole(spec: ModelSpec, cuts: tuple[int, ...]) -> None:
    whole = logical(build(spec))
    edges = (0, *cuts, spec.layers)
    count = len(edges) - 1
    stages = [
        build(spec, range(edges[stage], edges[stage + 1]), stage == 0, stage == count - 1) for stage in range(count)
    ]
    found = assemble(stages)
    for name, tensor in whole.items():
        assert torch.equal(tensor, found[name]), name
    if spec.tied:
        assert torch.equal(stages[0].embedding.weight, stages[-1].head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_the_rounded_ones(dtype: torch.dtype) -> None:
    wide, narrow = logical(build(LLAMA)), logical(build(LLAMA, dtype=dtype))
    for name, tensor in wide.items():
        assert torch.equal(tensor.to(dtype), narrow[name]), name


def test_padding_rows_are_zero() -> None:
    models = [build(LLAMA, degree=4, index=index) for index in range(4)]
    assert [len(model.embedding.weight) for model in models] == [25] * 4
    assert models[3].segments["head.weight"][0].sizes == (22, 36)
    for weight in (models[3].embedding.weight, models[3].head.weight):
        assert (weight[22:] == 0).all() and (weight[:22] != 0).all()


def test_more_ranks_than_vocabulary_chunks() -> None:
    spec = ModelSpec(vocabulary=5, hidden=8, layers=1, heads=4, ffn_hidden=8)
    models = [build(spec, degree=4, index=index) for index in range(4)]
    assert [model.segments["head.weight"][0].sizes[0] for model in models] == [2, 2, 1, 0]
    assert torch.equal(assemble(models)["head.weight"], logical(build(spec))["head.weight"])


def test_values_have_the_stated_deviation() -> None:
    spec = ModelSpec(vocabulary=2000, hidden=64, layers=8, heads=4, ffn_hidden=512, init_std=0.05, mlp_bias=True)
    whole = logical(build(spec))
    for name, tensor in whole.items():
        if name.endswith("norm.weight"):
            assert (tensor == 1).all()
        elif name.endswith(".bias"):
            assert (tensor == 0).all()
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            expected = 0.05 / 4 if residual else 0.05
            count = tensor.numel()
            assert abs(float(tensor.std()) / expected - 1) < 4 / (2 * count) ** 0.5, name
            assert abs(float(tensor.mean())) < 4 * expected / count**0.5, name


def test_layers_that_end_in_the_residual_stream_start_smaller_where_the_model_says_so() -> None:
    scaled, plain = (
        logical(build(LLAMA.model_copy(update={"residual_init_scale": wanted}))) for wanted in (True, False)
    )
    for name, tensor in plain.items():
        ends_there = name.endswith(("attention.output.weight", "mlp.down.weight"))
        expected = tensor / (2 * LLAMA.layers) ** 0.5 if ends_there else tensor
        assert torch.allclose(scaled[name], expected, rtol=1e-12, atol=0.0), name


def test_seeds_and_names_give_other_values() -> None:
    one, other = logical(build(LLAMA, seed=1)), logical(build(LLAMA, seed=2))
    assert not torch.equal(one["head.weight"], other["head.weight"])
    assert not torch.equal(one["head.weight"], one["embedding.weight"])
    assert not torch.equal(one["layers.0.attention.q.weight"], one["layers.1.attention.q.weight"])


@SPECS
def test_replicated_parameters_are_the_unsplit_ones(spec: ModelSpec) -> None:
    split, whole = build(spec, degree=2, index=1), build(spec)
    for fqn, segments in split.segments.items():
        assert (fqn in split.tp_replicated) == all(segment.whole for segment in segments), fqn
    assert whole.tp_replicated == split.tp_replicated
