"""The networks against ``transformers``: logits, loss and weights of tiny random models of every family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.data.batch import Batch
from meshwright.errors import InputError
from meshwright.job.hf_config import spec_from_hf
from meshwright.model.hugging_face import load_into, save
from meshwright.model.transformer import StageModel

transformers = pytest.importorskip("transformers")

VOCABULARY, SEQUENCE, ROWS = 97, 24, 3
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


def config_of(family: str) -> Any:
    """A tiny configuration by name."""
    made: dict[str, Any] = {
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=40, initializer_range=0.2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        ),
        "llama": lambda: transformers.LlamaConfig(**COMMON),
        "llama-tied": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
        "llama-bias": lambda: transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
        "llama3-rope": lambda: transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3),
        "qwen2": lambda: transformers.Qwen2Config(**COMMON),
        "qwen2-window": lambda: transformers.Qwen2Config(**COMMON, **WINDOW),
        "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=16),
        "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=5),
    }  # fmt: skip
    return made[family]()


FAMILIES = (
    "gpt2", "llama", "llama-tied", "llama-bias", "llama3-rope", "qwen2", "qwen2-window", "qwen3", "mistral",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _exact_norms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``transformers`` rounds to float32 inside every RMSNorm, even in a float64 model; here it keeps its type."""

    def forward(self: Any, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled.to(x.dtype)

    for module, name in (("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("mistral", "Mistral")):
        modeling = getattr(transformers.models, module)
        norm = getattr(getattr(modeling, f"modeling_{module}"), f"{name}RMSNorm")
        monkeypatch.setattr(norm, "forward", forward)
    yield


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, StageModel, Path]:
    """A ``transformers`` model in float64, ours loaded from its folder, and the folder."""
    return make_pair(request.param, tmp_path)


def make_pair(family: str, folder: Path) -> tuple[Any, StageModel, Path]:
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(config_of(family), attn_implementation="sdpa").double()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():  # neither ones nor zeros, so that every one counts
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            assert name
    theirs.eval()
    theirs.save_pretrained(folder)
    spec = spec_from_hf(json.loads((folder / "config.json").read_text()))
    ours = StageModel(spec, range(spec.layers), first=True, last=True).double().eval()
    load_into(ours, folder)
    return theirs, ours, folder


def make_batch(*, packed: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(5)
    stream = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator)
    tokens, labels = stream[:, :-1].contiguous(), stream[:, 1:].clone()
    positions = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE).clone()
    labels[0, :9] = -100
    labels[2, 5:] = -100
    documents = None
    if packed:
        documents = torch.zeros_like(positions)
        for row, cuts in enumerate(((4, 11), (1, 23), (12,))):
            for cut in cuts:
                documents[row, cut:] += 1
                positions[row, cut:] = torch.arange(SEQUENCE - cut)
                labels[row, cut - 1] = -100
    return Batch(tokens, labels, positions, documents, torch.arange(ROWS))


def expected_logits(theirs: Any, batch: Batch) -> Tensor:
    """Whole rows, or each document by itself."""
    if batch.documents is None:
        return theirs(batch.tokens).logits.view(-1, VOCABULARY)
    rows = []
    for tokens, documents in zip(batch.tokens, batch.documents, strict=True):
        lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
        rows += [theirs(document[None]).logits[0] for document in tokens.split(lengths)]
    return torch.cat(rows)


@pytest.mark.parametrize("packed", [False, True])
def test_loss_equals_in_float64(pair: tuple[Any, StageModel, Path], packed: bool) -> None:
    theirs, ours, _ = pair
    batch = make_batch(packed=packed)
    logits = expected_logits(theirs, batch)
    expected = F.cross_entropy(logits, batch.labels.view(-1), ignore_index=-100, reduction="sum") / batch.valid_tokens
    found = ours.loss(None, batch, batch.valid_tokens)
    assert found.dtype == torch.float64
    assert abs(found.item() - expected.item()) <= 1e-10
    expected.backward()
    found.backward()
    theirs_embedding = theirs.get_input_embeddings().weight.grad
    assert (ours.embedding.weight.grad - theirs_embedding).abs().max() <= 1e-10 * max(1.0, theirs_embedding.abs().max())


def test_ignored_labels_count_as_in_transformers(pair: tuple[Any, StageModel, Path]) -> None:
    theirs, ours, _ = pair
    batch = make_batch()
    shifted = torch.full((ROWS, SEQUENCE + 1), -100)  # transformers shifts the labels itself
    shifted[:, 1:] = batch.labels
    expected = theirs(torch.cat([batch.tokens, batch.tokens[:, :1]], 1), labels=shifted).loss
    found = ours.loss(None, batch, batch.valid_tokens)
    assert abs(found.item() - expected.item()) <= 1e-5  # transformers computes its own loss in float32
    assert batch.valid_tokens < batch.labels.numel()


@pytest.mark.parametrize("packed", [False, True])
def test_logits_equal_in_float32(pair: tuple[Any, StageModel, Path], packed: bool) -> None:
    theirs, ours, _ = pair
    theirs.float(), ours.float()
    batch = make_batch(packed=packed)
    with torch.no_grad():
        expected, found = expected_logits(theirs, batch), ours.logits(None, batch)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max())


def physical_logical(model: StageModel) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {s.name: s.box(parameters[fqn].detach()) for fqn, segments in model.segments.items() for s in segments}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [10**9, 9000])
def test_import_then_export_is_byte_equal(
    pair: tuple[Any, StageModel, Path], tmp_path: Path, dtype: torch.dtype, shard_bytes: int
) -> None:
    theirs, ours, _ = pair
    theirs.to(dtype).save_pretrained(tmp_path / "in")
    ours.to(dtype)
    load_into(ours, tmp_path / "in")
    logical = physical_logical(ours)
    written = save(tmp_path / "out", ours.spec, logical.__getitem__, dtype=dtype, max_shard_bytes=shard_bytes)
    assert (len(written) > 2) == (shard_bytes == 9000)
    original = load_file(tmp_path / "in" / "model.safetensors")
    exported: dict[str, Tensor] = {}
    for file in written:
        if file.suffix == ".safetensors":
            exported |= load_file(file)
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert tensor.dtype == exported[name].dtype
        assert torch.equal(tensor.view(torch.uint8), exported[name].view(torch.uint8)), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    other = StageModel(ours.spec, range(ours.spec.layers), first=True, last=True).to(dtype)
    load_into(other, tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))


def test_every_stage_reads_its_own(tmp_path: Path) -> None:
    _, whole, folder = make_pair("llama-tied", tmp_path)
    logical = physical_logical(whole)
    for layers, first, last in ((range(1), True, False), (range(1, 3), False, True)):
        stage = StageModel(whole.spec, layers, first=first, last=last).double()
        load_into(stage, folder)
        for name, tensor in physical_logical(stage).items():
            assert torch.equal(tensor, logical[name]), name


def test_weights_without_the_head_module_are_read(tmp_path: Path) -> None:
    theirs, ours, _ = make_pair("gpt2", tmp_path / "whole")
    theirs.transformer.save_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    assert "wte.weight" in stored
    stored["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    save_file(stored, tmp_path / "base" / "model.safetensors")
    again = StageModel(ours.spec, range(3), first=True, last=True).double()
    load_into(again, tmp_path / "base")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def damaged(folder: Path, change: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors[name].clone()
    elif change == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif change == "dtype":
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, file)
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif change == "absent":
        file.unlink()
    elif change == "index":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    elif change == "index names no file":
        index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", "1 tensors of the model are missing: model.layers.1.mlp.up_proj.weight"),
        ("extra", "1 tensors have no place in the model: model.layers.7.mlp.up_proj.weight"),
        ("shape", r"model.layers.1.mlp.up_proj.weight has shape \[47, 32\], the model's is \[48, 32\]"),
        ("dtype", "model.layers.1.mlp.up_proj.weight has type I8; use one of F64, F32, BF16, F16"),
        ("cut", "not a whole safetensors file"),
        ("absent", "only safetensors are read"),
        ("index", "not a safetensors index"),
        ("index names no file", "no such file"),
    ],
)
def test_wrong_weights_are_named(tmp_path: Path, change: str, words: str) -> None:
    _, ours, folder = make_pair("llama", tmp_path)
    damaged(folder, change)
    with pytest.raises(InputError, match=words) as raised:
        load_into(ours, folder)
    assert "\n" not in str(raised.value)


def test_untied_head_in_a_tied_model_is_refused(tmp_path: Path) -> None:
    _, ours, folder = make_pair("llama-tied", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    load_into(ours, folder)
    tensors["lm_head.weight"][5, 5] += 1
    save_file(tensors, file)
    with pytest.raises(InputError, match="set tied = false"):
        load_into(ours, folder)
