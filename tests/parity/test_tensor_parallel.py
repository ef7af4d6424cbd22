"""Tensor parallel against one device in float64: every product, the loss, and whole networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from meshwright.comm.mesh import Mesh
from meshwright.comm.record import TrafficRecorder
from meshwright.data.batch import Batch
from meshwright.job.layout import Layout
from meshwright.job.model_spec import ModelSpec
from meshwright.model.backward_part import backward_part
from meshwright.model.dropout import Randomness
from meshwright.model.initialise import initialise
from meshwright.model.partition import Partition
from meshwright.model.segments import Segment
from meshwright.model.transformer import StageModel
from meshwright.parallel.owned import Owned
from meshwright.parallel.tensor import TensorPartition, reduce_replicated_gradients
from meshwright.prove.pool import RankPool

BOUND = 1e-12
SIZES = {"small": (16, 8, 12), "large": (64, 192, 160)}
"""Tokens, inputs, outputs: below and above the size from which exchanges overlap with products."""

Ranks = Callable[[int], RankPool]


@contextmanager
def partition_of(degree: int) -> Iterator[tuple[Mesh, TensorPartition]]:
    with Mesh(Layout(tp=degree)) as mesh:
        yield mesh, TensorPartition(mesh)


def difference(value: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert value.shape == reference.shape, (value.shape, reference.shape)
    return float((value - reference).abs().max() / reference.abs().max().clamp_min(1e-300))


def beyond(worst: dict[str, float]) -> dict[str, float]:
    """The entries over the bound: none, if all is right."""
    return {name: value for name, value in worst.items() if not value <= BOUND}


def summed(value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def products(degree: int, size: str) -> dict[str, float]:
    """``column`` and ``row`` with biases, forward and backward."""
    tokens, inputs, outputs = SIZES[size]
    worst = {}
    with partition_of(degree) as (_, tp):
        index = tp.index
        x, weight, bias = random(1, tokens, inputs), random(2, outputs, inputs), random(3, outputs)
        gradient = random(4, tokens, outputs)
        whole = [leaf(x), leaf(weight), leaf(bias)]
        expected = Partition().column(*whole)
        expected.backward(gradient)

        mine = [leaf(tp.my_tokens(x)), leaf(weight.chunk(degree)[index]), leaf(bias.chunk(degree)[index])]
        out = tp.column(*mine)
        out.backward(gradient.chunk(degree, 1)[index])
        worst["column"] = difference(out, expected.chunk(degree, 1)[index])
        worst["column x"] = difference(mine[0].grad, tp.my_tokens(whole[0].grad))
        worst["column weight"] = difference(mine[1].grad, whole[1].grad.chunk(degree)[index])
        worst["column bias"] = difference(mine[2].grad, whole[2].grad.chunk(degree)[index])

        mine = [leaf(x.chunk(degree, 1)[index]), leaf(weight.chunk(degree, 1)[index]), leaf(bias)]
        out = tp.row(*mine)
        out.backward(tp.my_tokens(gradient))
        worst["row"] = difference(out, tp.my_tokens(expected))
        worst["row x"] = difference(mine[0].grad, whole[0].grad.chunk(degree, 1)[index])
        worst["row weight"] = difference(mine[1].grad, whole[1].grad.chunk(degree, 1)[index])
        worst["row bias"] = difference(summed(mine[2].grad), whole[2].grad)
    return worst


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_products_equal_one_device(ranks: Ranks, degree: int, size: str) -> None:
    for worst in ranks(degree).run(products, degree, size):
        assert not beyond(worst)


def padded_rows(weight: Tensor, degree: int, index: int) -> Tensor:
    rows = -(-weight.shape[0] // degree)
    piece = weight[index * rows : (index + 1) * rows]
    return torch.cat((piece, torch.zeros(rows - len(piece), weight.shape[1], dtype=weight.dtype)))


def vocabulary(degree: int, words: int, tokens: int, hidden: int) -> dict[str, float]:
    """Embedding, loss with ignored labels, and logits; the vocabulary need not divide."""
    worst = {}
    with partition_of(degree) as (_, tp):
        one = Partition()
        one.vocabulary = tp.vocabulary = words
        ids = torch.randint(words, (tokens,), generator=torch.Generator().manual_seed(5))
        ids[:3] = ids[-1] = words - 1  # a frequent one, from the last rank's rows, on two ranks' tokens
        weight = random(6, words, hidden)
        rows = -(-words // degree)
        gradient = random(7, tokens, hidden)
        whole = leaf(weight)
        expected = one.embed(ids, whole)
        expected.backward(gradient)
        mine = leaf(padded_rows(weight, degree, tp.index))
        out = tp.embed(ids, mine)
        out.backward(tp.my_tokens(gradient))
        worst["embed"] = difference(out, tp.my_tokens(expected))
        worst["embed weight"] = difference(mine.grad, padded_rows(whole.grad, degree, tp.index))

        x, labels = 4 * random(8, tokens, hidden), ids.roll(1)
        labels[tokens // 3 : tokens // 2] = -100
        whole_x, whole = leaf(x), leaf(weight)
        expected = one.loss(whole_x, whole, labels, 7.0)
        expected.backward()
        my_x, mine = leaf(tp.my_tokens(x)), leaf(padded_rows(weight, degree, tp.index))
        out = tp.loss(my_x, mine, labels, 7.0)
        out.backward()
        worst["loss"] = difference(out, expected)
        worst["loss x"] = difference(my_x.grad, tp.my_tokens(whole_x.grad))
        worst["loss weight"] = difference(mine.grad, padded_rows(whole.grad, degree, tp.index))
        worst["padding"] = float(mine.grad[max(0, words - tp.index * rows) :].abs().sum())
        worst["ranks differ"] = float(abs(summed(out.detach()) / degree - out.detach()))

        logits = tp.logits(my_x, mine)
        assert logits.shape == (tokens, words)
        worst["logits"] = difference(logits, one.logits(whole_x, whole).detach())

        nothing = tp.loss(my_x, mine, torch.full_like(labels, -100), 1.0)
        nothing.backward()
        assert float(nothing) == 0.0
    return worst


@pytest.mark.parametrize(("degree", "words"), [(2, 64), (4, 97), (4, 9)])
@pytest.mark.parametrize("tokens", [16, 256])
def test_vocabulary_parallel_equals_one_device(ranks: Ranks, degree: int, words: int, tokens: int) -> None:
    for worst in ranks(degree).run(vocabulary, degree, words, tokens, 40):
        assert not beyond(worst)


# -- whole networks -----------------------------------------------------------------------------------

LLAMA = ModelSpec(
    vocabulary=97, hidden=64, layers=2, heads=8, kv_heads=4, ffn_hidden=96, init_std=0.2, max_positions=64
)
GPT2 = LLAMA.model_copy(
    update={
        "kv_heads": 8, "positions": "learned", "norm": "layernorm", "activation": "gelu_tanh", "gated": False,
        "qkv_bias": True, "output_bias": True, "mlp_bias": True, "tied": True,
    }
)  # fmt: skip
MODELS = {
    "llama, kv heads = tp": LLAMA,
    "gpt2": GPT2,
    "biases": LLAMA.model_copy(update={"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
    "head norms": LLAMA.model_copy(update={"qk_norm": True}),
    "window, tied": LLAMA.model_copy(update={"sliding_window": 5, "window_from_layer": 1, "tied": True}),
    "dropout": GPT2.model_copy(update={"dropout": 0.3, "attention_dropout": 0.2}),
}


def batch_of(rows: int, sequence: int, *, packed: bool) -> Batch:
    """Random tokens; ``packed``: documents of uneven length, padding at the end, few labels in the first row."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(97, (rows, sequence), generator=generator)
    labels = tokens.roll(-1, 1)
    positions = torch.arange(sequence).repeat(rows, 1)
    documents = None
    if packed:
        documents = torch.zeros_like(tokens)
        for row in range(rows):
            for cut in (3 + row, sequence // 2 + row):
                documents[row, cut:] += 1
                positions[row, cut:] = torch.arange(sequence - cut)
                labels[row, cut - 1] = -100
        documents[-1, -4:] = -1
        labels[-1, -4:] = -100
        labels[0, 2:] = -100
    return Batch(tokens, labels, positions, documents, torch.arange(rows) + 3)


def model_of(spec: ModelSpec, partition: Partition) -> StageModel:
    model = StageModel(spec, range(spec.layers), True, True, partition).double()
    initialise(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # initialise leaves norms at one and biases at zero, where mistakes would hide
            if parameter.dim() == 1 and name in model.tp_replicated:
                parameter.add_(random(len(name), parameter.numel()), alpha=0.1)
    model.randomness = Randomness(1, 2)
    return model


def gradients_of(model: StageModel) -> dict[str, tuple[Segment, Tensor]]:
    """By logical name: where the box stands that this model holds of it, and the box's gradient."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        for segment in model.segments[name]:
            found[segment.name] = (segment, segment.box(parameter.grad))
    return found


def sum_replicated(model: StageModel, mesh: Mesh) -> None:
    """What the step does after ``finish_gradients``."""
    owned = [
        Owned(
            parameter=f"stage0:{name}", start=0, master=parameter.detach().view(-1),
            gradient=parameter.grad.view(-1), decay=True, counted=True, tp_replicated=name in model.tp_replicated,
        )
        for name, parameter in model.named_parameters() if parameter.grad is not None
    ]  # fmt: skip
    reduce_replicated_gradients(owned, mesh)


def compare_gradients(model: StageModel, reference: StageModel, floor: float = 1e-4) -> dict[str, float]:
    """Relative to the tensor's largest gradient, or to terms that cancel in it (a key bias has none)."""
    whole = {name: value for name, (_, value) in gradients_of(reference).items()}
    floor *= float(torch.cat([value.reshape(-1) for value in whole.values()]).norm())
    return {
        name: float((value - segment.cut(whole[name])).abs().max()) / max(float(whole[name].abs().max()), floor)
        for name, (segment, value) in gradients_of(model).items() if value.numel()
    }  # fmt: skip


def network(degree: int, spec: ModelSpec, rows: int, sequence: int, packed: bool) -> dict[str, Any]:
    batch = batch_of(rows, sequence, packed=packed)
    divisor = float(batch.valid_tokens)
    with partition_of(degree) as (mesh, tp):
        reference, model = model_of(spec, Partition()), model_of(spec, tp)
        expected = reference.loss(None, batch, divisor)
        expected.backward()
        loss = model.loss(None, batch, divisor)
        loss.backward()
        partial = float(model.final_norm.weight.grad.sum())
        sum_replicated(model, mesh)
        worst = compare_gradients(model, reference)
        worst["loss"] = difference(loss, expected)
        worst["logits"] = difference(model.logits(None, batch), reference.logits(None, batch).detach())
        digest = [parameter.grad for name, parameter in model.named_parameters() if name in model.tp_replicated]
        replicated = torch.cat([gradient.view(-1) for gradient in digest]).numpy().tobytes()
        return {"worst": worst, "replicated": replicated, "part": partial}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_network_equals_one_device(ranks: Ranks, name: str, degree: int) -> None:
    results = ranks(degree).run(network, degree, MODELS[name], 2, 24, True)
    for result in results:
        assert not beyond(result["worst"])
    # every rank ends with the same bits of what all of them hold, though each computed another part of it
    assert len({result["replicated"] for result in results}) == 1
    assert len({result["part"] for result in results}) == degree


def test_large_network_equals_one_device(ranks: Ranks) -> None:
    spec = LLAMA.model_copy(update={"hidden": 128, "head_size": 16, "ffn_hidden": 256})
    for result in ranks(4).run(network, 4, spec, 4, 64, False):
        assert not beyond(result["worst"])


# -- split backward ------------------------------------------------------------------------------------


def split_backward(degree: int, spec: ModelSpec, rows: int, sequence: int) -> dict[str, Any]:
    """The last stage of a pipeline, gradients of inputs and weights taken apart as zero-bubble schedules do."""
    batch = batch_of(rows, sequence, packed=True)
    divisor = float(batch.valid_tokens)
    hidden = random(13, rows * sequence, spec.hidden)
    with partition_of(degree) as (mesh, tp):
        models, inputs = [], []
        for _ in range(2):
            model = StageModel(spec, range(spec.layers), False, True, tp).double()
            initialise(model, 3)
            models.append(model)
            inputs.append(leaf(tp.my_tokens(hidden)))
        models[0].loss(inputs[0], batch, divisor).backward()
        loss = models[1].loss(inputs[1], batch, divisor)
        with backward_part(inputs=True, weights=False):
            _, groups = stage_backward_input([loss], None, [inputs[1]], iter(models[1].parameters()))
        early = [name for name, parameter in models[1].named_parameters() if parameter.grad is not None]
        with backward_part(inputs=False, weights=True):
            stage_backward_weight(iter(models[1].parameters()), groups)
        for model in models:
            sum_replicated(model, mesh)
        worst = {
            name: difference(one.grad, other.grad)
            for (name, one), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True)
        }
        worst["input"] = difference(inputs[1].grad, inputs[0].grad)
        return {"worst": worst, "early": early}


@pytest.mark.parametrize("name", ["llama, kv heads = tp", "gpt2", "head norms"])
def test_split_backward_gives_the_same_gradients(ranks: Ranks, name: str) -> None:
    spec = MODELS[name].model_copy(update={"tied": False})
    for result in ranks(2).run(split_backward, 2, spec, 2, 24):
        assert not beyond(result["worst"])
        assert result["early"] == []


# -- what is sent ---------------------------------------------------------------------------------------


def traffic(degree: int, spec: ModelSpec, rows: int, sequence: int, split: bool) -> dict[str, int]:
    """Payload bytes by operation, phase and part of the middle of a network, without embedding and loss."""
    batch = batch_of(rows, sequence, packed=False)
    with partition_of(degree) as (mesh, tp):
        model = StageModel(spec, range(spec.layers), False, False, tp)
        initialise(model, 3)
        hidden = leaf(tp.my_tokens(random(13, rows * sequence, spec.hidden).float()))
        parts: dict[str, TrafficRecorder] = {}
        with TrafficRecorder(mesh.axis_of) as parts["forward"]:
            out = model(hidden, batch)
        gradient = torch.ones_like(out)
        if split:
            with TrafficRecorder(mesh.axis_of) as parts["input"], backward_part(inputs=True, weights=False):
                _, groups = stage_backward_input([out], [gradient], [hidden], iter(model.parameters()))
            with TrafficRecorder(mesh.axis_of) as parts["weight"], backward_part(inputs=False, weights=True):
                stage_backward_weight(iter(model.parameters()), groups)
        else:
            with TrafficRecorder(mesh.axis_of) as parts["backward"]:
                out.backward(gradient)
        return {
            f"{part} {send.operation}": send.payload for part, recorder in parts.items() for send in recorder.sends
        }


@pytest.mark.parametrize(("rows", "sequence"), [(2, 24), (4, 128)])
@pytest.mark.parametrize("degree", [2, 4])
def test_sends_what_the_formula_says(ranks: Ranks, degree: int, rows: int, sequence: int) -> None:
    """An all-gather's payload is one rank's part, a reduce-scatter's the whole."""
    whole = 4 * rows * sequence * LLAMA.hidden * LLAMA.layers
    part = whole // degree
    for sends in ranks(degree).run(traffic, degree, LLAMA, rows, sequence, False):
        assert sends == {
            "forward all_gather": 2 * part, "forward reduce_scatter": 2 * whole,
            "backward all_gather": 4 * part, "backward reduce_scatter": 2 * whole,
        }  # fmt: skip
    for sends in ranks(degree).run(traffic, degree, LLAMA, rows, sequence, True):
        # the row-split products' output gradient is gathered for either part: keeping it would cost memory
        assert sends == {
            "forward all_gather": 2 * part, "forward reduce_scatter": 2 * whole,
            "input all_gather": 2 * part, "input reduce_scatter": 2 * whole,
            "weight all_gather": 4 * part,
        }  # fmt: skip


# -- 16 and 32 bits -------------------------------------------------------------------------------------


def low_precision(dtype: torch.dtype) -> dict[str, float]:
    """Distance from float64 on one device: of one device in ``dtype``, and of two ranks in it."""
    batch = batch_of(4, 64, packed=True)
    spec, divisor = MODELS["biases"], float(batch.valid_tokens)
    exact = model_of(spec, Partition())
    exact.loss(None, batch, divisor).backward()
    found = {}
    with partition_of(2) as (mesh, tp):
        for name, partition in (("one", Partition()), ("two", tp)):
            model = model_of(spec, partition).to(dtype)
            model.loss(None, batch, divisor).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None and parameter.grad.dtype == dtype
            if partition is tp:
                sum_replicated(model, mesh)
            found[name] = max(compare_gradients(model, exact, floor=1e-2).values())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_good_as_on_one_device(ranks: Ranks, dtype: torch.dtype) -> None:
    for found in ranks(2).run(low_precision, dtype):
        assert 0 < found["two"] <= 2 * found["one"] + torch.finfo(dtype).eps


def test_batch_helper_masks_what_it_says() -> None:
    batch = batch_of(2, 24, packed=True)
    assert batch.documents is not None and int((batch.labels[0] != -100).sum()) == 2
    assert replace(batch, documents=None).valid_tokens == batch.valid_tokens
