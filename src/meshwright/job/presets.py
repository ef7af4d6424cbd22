"""Well-known model shapes by name, from their papers and published configurations."""

from __future__ import annotations

import difflib
from typing import Any

from meshwright.errors import InputError
from meshwright.job.model_spec import ModelSpec

Fields = dict[str, Any]

_GPT2_STYLE: Fields = {
    "positions": "learned",
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "gated": False,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "tied": True,
}


def _gpt(hidden: int, layers: int, heads: int, vocabulary: int = 50257, positions: int = 1024) -> Fields:
    return {
        **_GPT2_STYLE,
        "vocabulary": vocabulary,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "ffn_hidden": 4 * hidden,
        "max_positions": positions,
    }


def _llama(
    vocabulary: int, hidden: int, layers: int, heads: int, kv_heads: int, ffn_hidden: int, positions: int, **more: Any
) -> Fields:
    return {
        "vocabulary": vocabulary,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn_hidden": ffn_hidden,
        "max_positions": positions,
        **more,
    }


def _qwen2(
    vocabulary: int, hidden: int, layers: int, heads: int, kv_heads: int, ffn_hidden: int, tied: bool = False
) -> Fields:
    more = {"rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": True, "tied": tied}
    return _llama(vocabulary, hidden, layers, heads, kv_heads, ffn_hidden, 32768, **more)


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, ffn_hidden: int, tied: bool = False) -> Fields:
    more = {"rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True, "head_size": 128, "tied": tied}
    return _llama(151936, hidden, layers, heads, kv_heads, ffn_hidden, 40960, **more)


_LLAMA31_ROPE = {"rope_theta": 5e5, "rope_scaling": (8.0, 1.0, 4.0, 8192.0)}

PRESETS: dict[str, Fields] = {
    # Radford et al. 2019, the released checkpoints.
    "gpt2": _gpt(768, 12, 12),
    "gpt2-medium": _gpt(1024, 24, 16),
    "gpt2-large": _gpt(1280, 36, 20),
    "gpt2-xl": _gpt(1600, 48, 25),
    # Brown et al. 2020, table 2.1. Two of its rows do not multiply out (1.3B: 24 heads of 128 in 2048; 13B: hidden
    # 5140); here they are 16 heads and 5120, as everyone who rebuilt them has read it.
    "gpt3-125m": _gpt(768, 12, 12, positions=2048),
    "gpt3-350m": _gpt(1024, 24, 16, positions=2048),
    "gpt3-760m": _gpt(1536, 24, 16, positions=2048),
    "gpt3-1.3b": _gpt(2048, 24, 16, positions=2048),
    "gpt3-2.7b": _gpt(2560, 32, 32, positions=2048),
    "gpt3-6.7b": _gpt(4096, 32, 32, positions=2048),
    "gpt3-13b": _gpt(5120, 40, 40, positions=2048),
    "gpt3-175b": _gpt(12288, 96, 96, positions=2048),
    # Narayanan et al., SC21, table 1 (vocabulary 51200, sequence 2048).
    "megatron-1.7b": _gpt(2304, 24, 24, 51200, 2048),
    "megatron-3.6b": _gpt(3072, 30, 32, 51200, 2048),
    "megatron-7.5b": _gpt(4096, 36, 32, 51200, 2048),
    "megatron-18b": _gpt(6144, 40, 48, 51200, 2048),
    "megatron-39b": _gpt(8192, 48, 64, 51200, 2048),
    "megatron-76b": _gpt(10240, 60, 80, 51200, 2048),
    "megatron-145b": _gpt(12288, 80, 96, 51200, 2048),
    "megatron-310b": _gpt(16384, 96, 128, 51200, 2048),
    "megatron-530b": _gpt(20480, 105, 128, 51200, 2048),
    "megatron-1t": _gpt(25600, 128, 160, 51200, 2048),
    # Touvron et al. 2023; Llama team 2024 (8B and 70B as first released, 405B with the 3.1 frequency scaling).
    "llama2-7b": _llama(32000, 4096, 32, 32, 32, 11008, 4096),
    "llama2-13b": _llama(32000, 5120, 40, 40, 40, 13824, 4096),
    "llama2-70b": _llama(32000, 8192, 80, 64, 8, 28672, 4096),
    "llama3-8b": _llama(128256, 4096, 32, 32, 8, 14336, 8192, rope_theta=5e5),
    "llama3-70b": _llama(128256, 8192, 80, 64, 8, 28672, 8192, rope_theta=5e5),
    "llama3-405b": _llama(128256, 16384, 126, 128, 8, 53248, 131072, **_LLAMA31_ROPE),
    # Qwen team 2024, 2025: published configurations.
    "qwen2-0.5b": _qwen2(151936, 896, 24, 14, 2, 4864, tied=True),
    "qwen2-1.5b": _qwen2(151936, 1536, 28, 12, 2, 8960, tied=True),
    "qwen2-7b": _qwen2(152064, 3584, 28, 28, 4, 18944),
    "qwen2-72b": _qwen2(152064, 8192, 80, 64, 8, 29568),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 8, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 8, 25600),
    # Jiang et al. 2023, 2024. The expert models can be planned, not trained.
    "mistral-7b": _llama(32000, 4096, 32, 32, 8, 14336, 32768, sliding_window=4096),
    "mixtral-8x7b": _llama(32000, 4096, 32, 32, 8, 14336, 32768, rope_theta=1e6, experts=8, experts_per_token=2),
    "mixtral-8x22b": _llama(32000, 6144, 56, 48, 8, 16384, 65536, rope_theta=1e6, experts=8, experts_per_token=2),
    # Ours, for the quickstart: ten million parameters that divide by 2, 4 and 8 in every direction.
    "llama-10m": _llama(4096, 256, 8, 8, 4, 1024, 2048),
}
"""Fields of :class:`ModelSpec` by preset name; sizes that follow from others are left out."""


def preset_fields(name: str) -> Fields:
    """The fields of one preset, to be completed or overridden.

    Raises:
        InputError: no preset has this name.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"model.preset: {name!r} is not a preset{hint} (presets: {', '.join(PRESETS)})")
    return {"name": name, **PRESETS[name]}


def preset(name: str) -> ModelSpec:
    """The model shape called ``name``.

    Raises:
        InputError: no preset has this name.
    """
    return ModelSpec(**preset_fields(name))
