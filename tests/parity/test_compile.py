"""Compiled blocks give what eager ones give."""

from __future__ import annotations

import pytest
import torch

from meshwright.data.batch import Batch
from meshwright.job.model_spec import ModelSpec
from meshwright.model.initialise import initialise
from meshwright.model.transformer import StageModel

LLAMA = ModelSpec(vocabulary=97, hidden=32, layers=2, heads=4, kv_heads=2, ffn_hidden=48, qk_norm=True)
GPT2 = ModelSpec(
    vocabulary=97, hidden=32, layers=2, heads=4, ffn_hidden=64, max_positions=16, positions="learned", norm="layernorm",
    activation="gelu_tanh", gated=False, qkv_bias=True, output_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip


def gradients(spec: ModelSpec, batch: Batch, dtype: torch.dtype, backend: str | None) -> list[torch.Tensor]:
    model = StageModel(spec, range(spec.layers), first=True, last=True).to(dtype)
    initialise(model, 0)
    if backend is not None:
        for block in model.layers.values():
            block.compile(backend=backend, fullgraph=True)
    loss = model.loss(None, batch, batch.valid_tokens)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.all)])
@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_compiled_blocks_equal_eager_ones(spec: ModelSpec, dtype: torch.dtype, bound: float, backend: str) -> None:
    stream = torch.randint(0, 97, (2, 17), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(16) > 6).long().expand(2, 16)
    batch = Batch(stream[:, :-1], stream[:, 1:], torch.arange(16).expand(2, 16), documents, torch.arange(2))
    torch.compiler.reset()
    for found, expected in zip(
        gradients(spec, batch, dtype, backend), gradients(spec, batch, dtype, None), strict=True
    ):
        assert (found - expected).abs().max() <= bound * max(float(expected.abs().max()), 1e-3)
