"""The rules of the programs that published rows were measured with, by source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.plan.rules import Rules

_MEGATRON = Rules(
    name="megatron",
    fused_attention=False,
    fused_softmax=True,
    dropout=True,
    overlap_gradients=0.0,
    overlap_gathers=0.0,
    wire_bytes=2.0,
)
MEGATRON_2021 = replace(_MEGATRON, name="megatron-2021")
"""Narayanan et al. 2021: fp16, transfers between stages sliced over the tp ranks and gathered again."""
VTRAIN = replace(_MEGATRON, name="megatron-deepspeed-vtrain", gradient_bytes=2.0)
BLOOM = replace(
    _MEGATRON,
    name="megatron-deepspeed",
    gradient_bytes=2.0,
    moment_bytes=12.0,
)
"""fp16 gradients beside fp16 parameters; DeepSpeed's ZeRO-1 also keeps its part of them in float32."""
BLOOM_BEFORE_FIX = replace(BLOOM, slowdown=1.03)
BLOOM_BF16 = replace(BLOOM, gradient_bytes=6.0)
"""DeepSpeed's BF16 optimizer: bfloat16 gradients and a float32 sum of them."""
_BLOOM_FIX_LINE = 770
"""Rows of the BLOOM chronicle above this line were measured before processes were bound to the right processor sockets,
which by its own words made every run 1 to 5 % faster."""
_FSDP = Rules(
    name="fsdp",
    parameter_bytes=4.0,
    master_bytes=0.0,
    full_working_copy=False,
    reduce_each_micro_batch=True,
)
MOSAIC = replace(_FSDP, name="mosaic-fsdp", logit_bytes=6.0)
"""Its fused cross-entropy takes 16-bit logits and writes their gradient over them."""
TITAN = replace(_FSDP, name="torchtitan", selective_part=0.5, layer_output_kept=7.75, logit_bytes=15.5)
"""Selective: every other product's output is kept, with the attention's (23,552 + 4,096 + 4,096 of 4,096 elements)."""
TITAN_COMPILED = replace(TITAN, name="torchtitan-compile", logit_bytes=13.0)
FMS = replace(_FSDP, name="fms-fsdp")
SIMUMAX = Rules(name="megatron-core-no-overlap", overlap_gradients=0.0, overlap_gathers=0.0, head_gradient_bytes=6.0)
"""The head's gradient stands in 16 bits beside its float32 sum."""
BRIDGE = Rules(name="megatron-bridge")


def _recomputed(raw: Mapping[str, Any]) -> float:
    """The part of the forward that is done again, from the printed hardware and model utilisation."""
    measured = raw["measured"] if isinstance(raw.get("measured"), dict) else {}
    if not all(isinstance(measured.get(key), float) and measured[key] > 0 for key in ("mfu", "hfu")):
        return 1.0
    return float(min(1.0, max(0.0, 3 * (measured["hfu"] / measured["mfu"] - 1))))


def _bloom(raw: Mapping[str, Any]) -> Rules:
    if "bf16" in str(raw.get("precision")):
        return BLOOM_BF16
    line = re.search(r"chronicles-prequel\.md line ([0-9]+)", str(raw.get("source")))
    return BLOOM_BEFORE_FIX if line and int(line[1]) < _BLOOM_FIX_LINE else BLOOM


def program_of(source: str, raw: Mapping[str, Any]) -> Rules:
    """The rules for a row of ``source``."""
    layout = raw["layout"] if isinstance(raw.get("layout"), dict) else {}
    if source == "titan":
        return TITAN_COMPILED if layout.get("compile") else TITAN
    if source == "fms":
        return replace(FMS, selective_part=_recomputed(raw))
    if source.startswith("mosaic"):
        return MOSAIC
    table = {
        "titan": TITAN,
        "fms": FMS,
        "simumax": SIMUMAX,
        "mbridge": BRIDGE,
        "narayanan": MEGATRON_2021,
        "vtrain-single": VTRAIN,
        "vtrain-multi": VTRAIN,
        "bloom": _bloom(raw),
    }
    return table.get(source, BRIDGE)
