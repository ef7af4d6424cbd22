"""Hugging Face ``config.json`` to :class:`ModelSpec` and back, for the families that are built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from meshwright.errors import InputError
from meshwright.job.model_spec import ModelSpec

MODEL_TYPES: tuple[str, ...] = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "mixtral")
"""The ``model_type`` values that are understood; mixtral can be planned, not trained."""

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}
# What a config.json that leaves a key out means: the defaults of the configuration classes.
_THETA = {"llama": 1e4, "mistral": 1e4, "qwen2": 1e4, "qwen3": 1e4, "mixtral": 1e6}
_EPS = {"llama": 1e-6, "mistral": 1e-6, "qwen2": 1e-6, "qwen3": 1e-6, "mixtral": 1e-5}
_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "mixtral": 131072}


def _refuse(key: str, value: object, rule: str) -> NoReturn:
    raise InputError(f"config.json: {key}={json.dumps(value)} {rule}")


def _size(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(key, value, "must be a whole number of at least 1")
    return value


def _must_be(config: dict[str, Any], legal: dict[str, object]) -> None:
    for key, expected in legal.items():
        if config.get(key, expected) != expected:
            _refuse(key, config[key], f"is not built; only {json.dumps(expected)} is")


def _activation(config: dict[str, Any], key: str, default: str) -> str:
    name = config.get(key, default)
    if name not in _ACTIVATIONS:
        _refuse(key, name, f"is not built; use one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _gpt2_fields(config: dict[str, Any]) -> dict[str, Any]:
    _must_be(
        config,
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
    )
    residual, embedding = config.get("resid_pdrop", 0.1), config.get("embd_pdrop", 0.1)
    if residual != embedding:
        _refuse("resid_pdrop", residual, f"must equal embd_pdrop={embedding}; there is one dropout for both")
    hidden = _size(config, "n_embd")
    return {
        "vocabulary": _size(config, "vocab_size"),
        "hidden": hidden,
        "layers": _size(config, "n_layer"),
        "heads": _size(config, "n_head"),
        "ffn_hidden": config.get("n_inner") or 4 * hidden,
        "max_positions": config.get("n_positions", 1024),
        "positions": "learned",
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(config, "activation_function", "gelu_new"),
        "gated": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tied": config.get("tie_word_embeddings", True),
        "dropout": float(residual),
        "attention_dropout": float(config.get("attn_pdrop", 0.1)),
        "init_std": config.get("initializer_range", 0.02),
    }


def _rope(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Base and scaling; older files have rope_theta and rope_scaling, newer ones rope_parameters."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", _THETA[kind]))
    scaling = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        _refuse("partial_rotary_factor", partial, "is not built; only 1.0 is")
    if scaling not in ("default", "llama3"):
        _refuse("rope_type", scaling, "is not built; use default or llama3")
    if scaling == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for name in names:
        if name not in parameters:
            _refuse(name, None, "is missing beside rope_type=llama3")
    return {"rope_theta": float(theta), "rope_scaling": tuple(float(parameters[name]) for name in names)}


def _window(config: dict[str, Any], kind: str, layers: int) -> dict[str, Any]:
    window = config.get("sliding_window", 4096 if kind == "mistral" else None)
    first = 0
    if kind in ("qwen2", "qwen3"):
        if not config.get("use_sliding_window", False):
            window = None
        first = config.get("max_window_layers", 28)
        kinds = config.get("layer_types")
        if window is not None and kinds is not None:
            expected = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
            if kinds != expected:
                _refuse("layer_types", kinds, f"is not built; only sliding_attention from layer {first} on is")
    elif kind == "llama":
        window = None
    return {"sliding_window": window, "window_from_layer": first if window is not None else 0}


def _biases(config: dict[str, Any], kind: str) -> dict[str, bool]:
    if kind in ("llama", "qwen3"):
        attention = bool(config.get("attention_bias", False))
        return {
            "qkv_bias": attention,
            "output_bias": attention,
            "mlp_bias": bool(config.get("mlp_bias", False)) if kind == "llama" else False,
        }
    return {"qkv_bias": kind == "qwen2", "output_bias": False, "mlp_bias": False}


def _gated_fields(config: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind == "llama":
        _must_be(config, {"pretraining_tp": 1})
    heads, layers = _size(config, "num_attention_heads"), _size(config, "num_hidden_layers")
    # Mistral, Mixtral and Qwen3 have fewer key/value heads and wider heads by default, Llama and Qwen2 do not.
    kv_default = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32}.get(kind, heads)
    kv_heads = config.get("num_key_value_heads", kv_default)
    fields = {
        "vocabulary": _size(config, "vocab_size"),
        "hidden": _size(config, "hidden_size"),
        "layers": layers,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "ffn_hidden": _size(config, "intermediate_size"),
        "max_positions": config.get("max_position_embeddings", _POSITIONS[kind]),
        "norm_eps": config.get("rms_norm_eps", _EPS[kind]),
        "activation": _activation(config, "hidden_act", "silu"),
        "qk_norm": kind == "qwen3",
        "tied": config.get("tie_word_embeddings", False),
        "attention_dropout": float(config.get("attention_dropout", 0.0)),
        "init_std": config.get("initializer_range", 0.02),
        **_rope(config, kind),
        **_window(config, kind, layers),
        **_biases(config, kind),
    }
    head_size = config.get("head_dim", 128 if kind == "qwen3" else None)
    if head_size is not None:
        fields["head_size"] = head_size
    if kind == "mixtral":
        fields |= {
            "experts": config.get("num_local_experts", 8),
            "experts_per_token": config.get("num_experts_per_tok", 2),
        }
    return fields


def fields_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of :class:`ModelSpec` that a Hugging Face configuration gives.

    Raises:
        InputError: the model type or an option of it is not built; the message names it.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        _refuse("model_type", kind, f"is not built; use one of {', '.join(MODEL_TYPES)}")
    if config.get("quantization_config") is not None:
        raise InputError("config.json: quantization_config is not built; give an unquantised model")
    fields = _gpt2_fields(config) if kind == "gpt2" else _gated_fields(config, kind)
    return {"name": kind, **fields}


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The model shape of a Hugging Face configuration.

    Raises:
        InputError: the model type or an option of it is not built; the message names it.
    """
    try:
        return ModelSpec(**fields_from_hf(config))
    except ValueError as error:
        raise InputError(f"config.json: {error}") from None


def fields_from_hf_folder(path: str, where: str) -> dict[str, Any]:
    """The fields given by ``path``: a config.json, or a folder with one. ``where`` names the asking key.

    Raises:
        InputError: there is no such file, or it is not understood.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(
            f"{where}: {path!r} has no readable config.json ({reason}); give a Hugging Face folder or a config.json"
            + (", or a whole step-N folder" if where == "model.init_from" else "")
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: {file} is not UTF-8 at byte {error.start}; give a config.json") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: {file} is not JSON at line {error.lineno}, column {error.colno} ({error.msg}); "
            "give a config.json"
        ) from None
    if not isinstance(config, dict):
        raise InputError(f"{where}: {file} holds no JSON object; give a config.json")
    return fields_from_hf(config)


def _family(spec: ModelSpec) -> str:
    """The Hugging Face family that can hold this shape exactly."""
    gpt2 = {
        "positions": "learned", "norm": "layernorm", "gated": False, "qkv_bias": True, "output_bias": True,
        "mlp_bias": True, "qk_norm": False, "experts": 0, "sliding_window": None,
    }  # fmt: skip
    values = spec.model_dump()
    if all(values[key] == value for key, value in gpt2.items()):
        if spec.kv_heads == spec.heads and spec.head_size * spec.heads == spec.hidden:
            return "gpt2"
    elif spec.positions == "rope" and spec.norm == "rmsnorm" and spec.gated and spec.dropout == 0.0:
        biases = (spec.qkv_bias, spec.output_bias, spec.mlp_bias)
        everywhere = spec.sliding_window is None or spec.window_from_layer == 0
        if spec.qk_norm:
            fits = {"qwen3": spec.qkv_bias == spec.output_bias and not spec.mlp_bias and not spec.experts}
        else:
            fits = {
                "mixtral": spec.experts > 0 and not any(biases) and everywhere,
                "llama": spec.experts == 0 and spec.qkv_bias == spec.output_bias and spec.sliding_window is None,
                "mistral": spec.experts == 0 and not any(biases) and everywhere,
                "qwen2": spec.experts == 0 and biases == (True, False, False),
            }
        for family, fit in fits.items():
            if fit:
                return family
    raise InputError(
        f"model: {spec.name!r} has no Hugging Face family with its mix of options; "
        f"exported are {', '.join(MODEL_TYPES)}"
    )


def _gpt2_config(spec: ModelSpec) -> dict[str, Any]:
    names = {"gelu_tanh": "gelu_new", "gelu": "gelu", "silu": "silu"}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": spec.vocabulary,
        "n_embd": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": spec.ffn_hidden,
        "n_positions": spec.max_positions,
        "activation_function": names[spec.activation],
        "layer_norm_epsilon": spec.norm_eps,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "attn_pdrop": spec.attention_dropout,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
    }


_CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
}  # fmt: skip


def _gated_config(spec: ModelSpec, family: str) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if spec.rope_scaling is not None:
        factor, low, high, original = spec.rope_scaling
        scaling = {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": int(original),
        }  # fmt: skip
    config: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "intermediate_size": spec.ffn_hidden,
        "max_position_embeddings": spec.max_positions,
        "hidden_act": {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[spec.activation],
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling,
        "attention_dropout": spec.attention_dropout,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
    }
    if family in ("llama", "qwen3"):
        config["attention_bias"] = spec.qkv_bias
    if family == "llama":
        config["mlp_bias"] = spec.mlp_bias
    if family in ("mistral", "mixtral"):
        config["sliding_window"] = spec.sliding_window
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = spec.sliding_window is not None
        config["sliding_window"] = spec.sliding_window
        config["max_window_layers"] = spec.window_from_layer if spec.sliding_window is not None else spec.layers
    if family == "mixtral":
        config |= {"num_local_experts": spec.experts, "num_experts_per_tok": spec.experts_per_token}
    return config


def hf_config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """A Hugging Face configuration of this shape: the inverse of :func:`spec_from_hf`.

    Raises:
        InputError: no Hugging Face family has this mix of options.
    """
    family = _family(spec)
    return _gpt2_config(spec) if family == "gpt2" else _gated_config(spec, family)
