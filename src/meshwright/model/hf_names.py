"""Hugging Face tensor names and layouts of every parameter, for GPT-2, Llama, Qwen2, Qwen3 and Mistral weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.job.hf_config import hf_config_from_spec
from meshwright.job.model_spec import ModelSpec

_LLAMA_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_GPT2_MODULES = {
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_ENDS = {
    "llama": {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
    "gpt2": {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
}


@dataclass(frozen=True)
class HuggingFaceTensor:
    """One tensor of a Hugging Face file: logical parameters one after the other along dim 0, maybe transposed."""

    name: str
    parts: tuple[str, ...]
    """Full names of the logical parameters."""
    rows: tuple[int, ...]
    """Their extents along dim 0."""
    rest: tuple[int, ...]
    """Their other extents."""
    transposed: bool
    """GPT-2 stores matrices ``[in, out]``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored in the file."""
        shape = (sum(self.rows), *self.rest)
        return shape[::-1] if self.transposed else shape

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def assemble(self, logical: Callable[[str], Tensor]) -> Tensor:
        """The stored tensor (contiguous), from whole logical ones."""
        tensors = [logical(part) for part in self.parts]
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return (whole.t() if self.transposed else whole).contiguous()

    def index(self, part: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
        """Where in the stored tensor a box of one logical parameter lies (to be transposed after reading)."""
        before = sum(self.rows[: self.parts.index(part)])
        slices = [slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
        slices[0] = slice(before + offsets[0], before + offsets[0] + sizes[0])
        return tuple(slices[::-1] if self.transposed else slices)


def hugging_face_tensors(spec: ModelSpec) -> Iterator[HuggingFaceTensor]:
    """Every tensor of the model's Hugging Face file, in the order of the network.

    A tied head is not among them: the file holds the embedding only.

    Raises:
        InputError: no Hugging Face family that is built has this shape.
    """
    family = hf_config_from_spec(spec)["model_type"]
    if spec.experts:
        raise InputError(f"model: {family} weights are not built (experts={spec.experts}); only dense models are")
    style = "gpt2" if family == "gpt2" else "llama"
    grouped: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in spec.parameters():
        grouped.setdefault(_stored_name(style, name), []).append((name, shape))
    for stored, logical in grouped.items():
        module = stored.split(".")[-2]
        yield HuggingFaceTensor(
            stored,
            parts=tuple(name for name, _ in logical),
            rows=tuple(shape[0] for _, shape in logical),
            rest=logical[0][1][1:],
            transposed=style == "gpt2" and module in ("c_attn", "c_proj", "c_fc") and len(logical[0][1]) == 2,
        )


def _stored_name(style: str, name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_ENDS[style][module]}.{leaf}"
    _, layer, inner = module.split(".", 2)
    if style == "gpt2":
        return f"transformer.h.{layer}.{_GPT2_MODULES[inner]}.{leaf}"
    return f"model.layers.{layer}.{_LLAMA_MODULES[inner]}.{leaf}"
