"""Hugging Face configurations in and out, against the configurations and models of ``transformers``."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.job.hf_config import fields_from_hf_folder, hf_config_from_spec, spec_from_hf
from meshwright.job.model_spec import ModelSpec
from meshwright.job.presets import PRESETS, preset

transformers = pytest.importorskip("transformers")

_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": 97}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 32}),
    "gpt2-wide": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "activation_function": "gelu"}),
    "llama": ("llama", _SMALL),
    "llama-bias-tied": ("llama", {**_SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-3.1": ("llama", {**_SMALL, "rope_parameters": _LLAMA3, "head_dim": 16}),
    "qwen2": ("qwen2", _SMALL),
    "qwen2-window": ("qwen2", {**_SMALL, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**_SMALL, "head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("mistral", _SMALL),
    "mistral-no-window": ("mistral", {**_SMALL, "sliding_window": None, "attention_dropout": 0.1}),
    "mixtral": ("mixtral", {**_SMALL, "num_local_experts": 4}),
}


def _parameters(config: Any) -> int:
    import torch

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", _CONFIGS)
def test_counts_and_round_trip(name: str) -> None:
    kind, values = _CONFIGS[name]
    config = transformers.AutoConfig.for_model(kind, **values)
    spec = spec_from_hf(config.to_dict())
    assert spec.parameter_count == _parameters(config)
    written = hf_config_from_spec(spec)
    again = transformers.AutoConfig.for_model(**written)
    assert spec_from_hf(written).model_copy(update={"name": spec.name}) == spec
    assert spec_from_hf(again.to_dict()).model_copy(update={"name": spec.name}) == spec
    assert _parameters(again) == spec.parameter_count
    if name not in ("mistral-no-window",):
        assert written["model_type"] == kind


def test_rope_and_window_reach_transformers() -> None:
    written = hf_config_from_spec(spec_from_hf(transformers.LlamaConfig(**_CONFIGS["llama-3.1"][1]).to_dict()))
    assert transformers.LlamaConfig(**written).rope_parameters == _LLAMA3
    written = hf_config_from_spec(spec_from_hf(transformers.Qwen2Config(**_CONFIGS["qwen2-window"][1]).to_dict()))
    kinds = transformers.Qwen2Config(**written).layer_types
    assert kinds == ["full_attention", "sliding_attention", "sliding_attention"]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "qwen3", "mistral", "mixtral"])
def test_left_out_keys_mean_what_transformers_makes_of_them(kind: str) -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97} if kind == "gpt2" else dict(_SMALL)
    sizes.pop("num_key_value_heads", None)
    if kind in ("qwen2", "qwen3"):
        sizes["num_attention_heads"] = 32  # these two default to 32 key/value heads
    full = transformers.AutoConfig.for_model(kind, **sizes).to_dict()
    assert spec_from_hf({"model_type": kind, **sizes}) == spec_from_hf(full)


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith(("megatron", "gpt3"))])
def test_presets_have_a_hugging_face_form(name: str) -> None:
    spec = preset(name)
    assert spec_from_hf(hf_config_from_spec(spec)).model_copy(update={"name": name}) == spec


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gemma"}, 'model_type="gemma" is not built; use one of gpt2, llama, qwen2, qwen3, mistral, '
         "mixtral"),
        ({"hidden_act": "relu"}, 'hidden_act="relu" is not built; use one of gelu_new, gelu_pytorch_tanh, gelu, silu'),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, 'rope_type="yarn" is not built; use default or llama3'),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor=null is missing beside rope_type=llama3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not built; only 1.0 is"),
        ({"pretraining_tp": 2}, "pretraining_tp=2 is not built; only 1 is"),
        ({"hidden_size": None}, "hidden_size=null must be a whole number of at least 1"),
        ({"quantization_config": {}}, "quantization_config is not built; give an unquantised model"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        spec_from_hf({"model_type": "llama", **_SMALL, **change})
    assert str(error.value) == f"config.json: {sentence}"


def test_gpt2_options_not_built() -> None:
    sizes = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97}
    with pytest.raises(InputError, match=r"resid_pdrop=0\.2 must equal embd_pdrop=0\.1"):
        spec_from_hf({**sizes, "resid_pdrop": 0.2})
    with pytest.raises(InputError, match="scale_attn_by_inverse_layer_idx=true is not built; only false is"):
        spec_from_hf({**sizes, "scale_attn_by_inverse_layer_idx": True})


def test_a_shape_without_a_family_is_refused() -> None:
    spec = ModelSpec(vocabulary=9, hidden=8, layers=1, heads=2, ffn_hidden=8, norm="layernorm")
    with pytest.raises(InputError, match="model: 'custom' has no Hugging Face family with its mix of options"):
        hf_config_from_spec(spec)


def test_missing_folder_is_named() -> None:
    with pytest.raises(InputError, match=r"model.hf: '/nowhere' has no readable config.json \(No such file"):
        fields_from_hf_folder("/nowhere", "model.hf")
