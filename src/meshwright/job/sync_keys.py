"""The keys of [sync] that say how gradients are compressed, and how often replicas meet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from meshwright.job.sections import Below1, NonNegative, Positive, Section

Compression = Literal[
    "none", "fp16", "bf16", "int8", "fp8", "sign", "qsgd", "powersgd", "dgc", "one-bit-adam", "zero-one-adam"
]
CASTS = ("fp16", "bf16")
"""Element by element, without scales."""
BLOCKWISE = ("int8", "fp8", "sign", "qsgd", "one-bit-adam", "zero-one-adam")
"""With a scale for each block of elements."""
MOMENTUM_ONLY = ("one-bit-adam", "zero-one-adam")
"""What travels is Adam's momentum."""

KEYS_OF: dict[str, tuple[str, ...]] = {
    "compression_block": BLOCKWISE,
    "compression_bits": ("qsgd",),
    "compression_rank": ("powersgd",),
    "compression_least_saving": ("powersgd",),
    "compression_sparsity": ("dgc",),
    "momentum_masking": ("dgc",),
}
"""Which kinds use a key; the others refuse it."""
LEVEL_AND_WARMUP = ("compression_level", "compression_warmup_steps")
"""Keys of every kind that compresses gradients."""


class CompressionKeys(Section):
    """How gradients are compressed on their way."""

    compression: Compression = "none"
    """What travels instead of whole gradients; except for ``qsgd``, what is lost is added to the next gradients."""
    compression_level: Literal["all", "slow"] = "all"
    """``slow``: only the sum between the copies of a sharded state (``shard`` below ``dp``), or with ``zero=0`` between
    nodes (``node_size``), not that inside them."""
    compression_warmup_steps: NonNegativeInt = 0
    """Steps with whole gradients first; ``dgc``: steps over which the sparsity rises."""
    compression_block: PositiveInt = 256
    """``int8``, ``fp8``, ``sign``, ``qsgd`` and the Adams: elements that share a scale; with 1 nothing is lost."""
    compression_bits: Literal[2, 4, 8] = 4
    """``qsgd``: bits of an element."""
    compression_rank: PositiveInt = 4
    """``powersgd``: columns of the two factors of a matrix."""
    compression_least_saving: NonNegative = 2.0
    """``powersgd``: matrices for which it saves fewer times their bytes travel whole."""
    compression_sparsity: Below1 = 0.999
    """``dgc``: the part of the elements that does not travel."""
    momentum_masking: bool = True
    """``dgc``: what travelled leaves no momentum behind."""


class LessOftenKeys(Section):
    """How often replicas that train apart meet, and what they do then."""

    period: PositiveInt = 16
    """``local``, ``easgd``, ``diloco``: steps between two meetings of all replicas."""
    synchronous_steps: NonNegativeInt = 0
    """``local``: steps at the start in which gradients are summed as usual (post-local SGD)."""
    average: Literal["parameters", "state"] = "parameters"
    """``local``: whether the optimizer's moments are averaged too."""
    group_size: PositiveInt | None = None
    """``local``: consecutive replicas that meet among themselves every ``group_period`` steps."""
    group_period: PositiveInt | None = None
    """``local``: a divisor of ``period``."""
    elasticity: Annotated[float, Field(gt=0, le=1)] | None = None
    """``easgd``: how far a replica moves to the center at a meeting; absent: 0.9 / replicas."""
    outer_lr: Positive = 0.7
    """``diloco``: learning rate of the outer step."""
    outer_momentum: Below1 = 0.9
    """``diloco``: Nesterov momentum of the outer step."""
    fragments: PositiveInt = 1
    """``diloco``: parts of the model that meet in turn (streaming)."""
    overlap: NonNegativeInt = 0
    """``diloco``: steps that an outer gradient may travel while training goes on."""
    keep_local: Below1 = 0.0
    """``diloco``: what a replica keeps of its own parameters at a meeting."""


REPLICA_STRATEGIES: frozenset[str] = frozenset({"local", "easgd", "diloco"})
"""Strategies under which replicas train apart."""
STRATEGY_KEYS: dict[str, tuple[str, ...]] = {
    "period": ("local", "easgd", "diloco"),
    "synchronous_steps": ("local",),
    "average": ("local",),
    "group_size": ("local",),
    "group_period": ("local",),
    "elasticity": ("easgd",),
    "outer_lr": ("diloco",),
    "outer_momentum": ("diloco",),
    "fragments": ("diloco",),
    "overlap": ("diloco",),
    "keep_local": ("diloco",),
}
"""Which strategies use a key; the others refuse it."""
