"""Dropout masks are functions of (seed, step, example, layer, site, element): any slice sees the same mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.data.batch import Batch
from meshwright.job.model_spec import ModelSpec
from meshwright.model.attention import AttentionCore, LayerContext, prepare
from meshwright.model.dropout import Randomness
from meshwright.model.initialise import initialise
from meshwright.model.partition import Partition
from meshwright.model.transformer import StageModel, drop_hidden

SPEC = ModelSpec(
    vocabulary=61, hidden=24, layers=2, heads=4, kv_heads=2, ffn_hidden=40, dropout=0.25, attention_dropout=0.25
)
ROWS, SEQUENCE = 4, 12


class Slice(Partition):
    def __init__(self, degree: int, index: int) -> None:
        self.degree, self.index = degree, index

    def my_tokens(self, x: Tensor) -> Tensor:
        return x.chunk(self.degree)[self.index]


def batch_of(rows: range = range(ROWS), *, documents: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(1)
    stream = torch.randint(0, 61, (ROWS, SEQUENCE + 1), generator=generator)[list(rows)]
    positions = torch.arange(SEQUENCE).expand(len(rows), SEQUENCE)
    same = torch.zeros(len(rows), SEQUENCE, dtype=torch.int64) if documents else None
    return Batch(stream[:, :-1], stream[:, 1:], positions, same, torch.tensor(list(rows)))


def model_of(spec: ModelSpec = SPEC) -> StageModel:
    model = StageModel(spec, range(spec.layers), first=True, last=True).double()
    initialise(model, 3)
    model.randomness = Randomness(5, 17)
    return model


def context_of(step: int = 17, rows: range = range(ROWS)) -> LayerContext:
    return prepare(SPEC, batch_of(rows), range(2), torch.float64, Randomness(5, step))


def hidden_mask(layer: int = 0, site: str = "mlp", step: int = 17, partition: Partition | None = None) -> Tensor:
    partition = partition or Partition()
    ones = torch.ones(ROWS * SEQUENCE // partition.degree, 24, dtype=torch.float64)
    return drop_hidden(ones, SPEC.dropout, layer, site, context_of(step), partition)


@pytest.mark.parametrize("degree", [2, 3, 4, 6])
def test_token_chunks_see_the_same_mask(degree: int) -> None:
    chunks = [hidden_mask(partition=Slice(degree, index)) for index in range(degree)]
    assert torch.equal(torch.cat(chunks), hidden_mask())


def test_each_layer_site_step_and_example_has_its_own_mask() -> None:
    masks = [hidden_mask(), hidden_mask(layer=1), hidden_mask(site="attention"), hidden_mask(step=18)]
    rows = [mask.view(ROWS, -1)[row] for mask in masks for row in range(ROWS)]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


def test_share_and_scale() -> None:
    ones = torch.ones(ROWS * SEQUENCE, 2400, dtype=torch.float64)
    dropped = drop_hidden(ones, 0.25, 0, "mlp", context_of(), Partition())
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.75}
    share = float((dropped == 0).double().mean())
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / dropped.numel()) ** 0.5


def test_gradient_goes_through_the_same_mask() -> None:
    x = torch.randn(ROWS * SEQUENCE, 24, dtype=torch.float64, requires_grad=True)
    drop_hidden(x, 0.25, 0, "mlp", context_of(), Partition()).sum().backward()
    assert torch.equal(x.grad, hidden_mask())


def attention_out(partition: Partition, qkv: Tensor) -> Tensor:
    core = AttentionCore(SPEC, 0, partition)
    size = SPEC.head_size
    q, k, v = qkv.split((4 * size, 2 * size, 2 * size), 1)
    mine = torch.cat([part.chunk(partition.degree, 1)[partition.index] for part in (q, k, v)], 1)
    return core(mine, context_of())


def test_heads_see_the_same_mask_wherever_they_are() -> None:
    qkv = torch.randn(ROWS * SEQUENCE, 8 * SPEC.head_size, dtype=torch.float64)
    halves = [attention_out(Slice(2, index), qkv) for index in range(2)]
    whole = attention_out(Partition(), qkv)
    assert torch.equal(torch.cat(halves, 1), whole)
    plain = AttentionCore(SPEC, 0, Partition())(qkv, prepare(SPEC, batch_of(), range(2), torch.float64, None))
    assert not torch.allclose(whole, plain)


def test_attention_dropout_has_the_expected_mean() -> None:
    qkv = torch.randn(ROWS * SEQUENCE, 8 * SPEC.head_size, dtype=torch.float64)
    core = AttentionCore(SPEC, 0, Partition())
    mean = torch.stack([core(qkv, context_of(step)) for step in range(300)]).mean(0)
    plain = core(qkv, prepare(SPEC, batch_of(), range(2), torch.float64, None))
    assert (mean - plain).abs().mean() < 0.06 < plain.abs().mean()


def test_micro_batches_do_not_change_the_masks() -> None:
    model = model_of()
    whole = model.loss(None, batch_of(), 48)
    parts = [model.loss(None, batch_of(rows), 48) for rows in (range(1), range(1, 3), range(3, 4))]
    assert abs(whole.item() - sum(part.item() for part in parts)) < 1e-12
    assert (
        abs(whole.item() - model_of(SPEC.model_copy(update={"dropout": 0.0})).loss(None, batch_of(), 48).item()) > 1e-6
    )


def test_causal_and_masked_path_agree() -> None:
    model = model_of()
    assert abs(model.loss(None, batch_of(), 1).item() - model.loss(None, batch_of(documents=True), 1).item()) < 1e-12


def test_recomputing_a_block_draws_the_same_mask() -> None:
    gradients = []
    for recompute in (False, True):
        model = model_of()
        if recompute:
            for block in model.layers.values():
                forward = block.forward
                block.forward = lambda *args, run=forward: checkpoint(run, *args, use_reentrant=False)
        model.loss(None, batch_of(), 48).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_evaluation_has_no_dropout() -> None:
    model, without = model_of(), model_of(SPEC.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0}))
    model.eval()
    assert model.loss(None, batch_of(), 48) == without.loss(None, batch_of(), 48)


def test_training_without_randomness_is_refused() -> None:
    model = model_of()
    model.randomness = None
    with pytest.raises(RuntimeError, match=r"model\.randomness"):
        model.loss(None, batch_of(), 48)
