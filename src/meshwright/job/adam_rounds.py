"""Which steps of 1-bit Adam and of 0/1 Adam exchange whole gradients (``sync.compress_adam``)."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

REFRESHES_BEFORE_DOUBLING = 16
"""0/1 Adam: so many full rounds, then the distance between them doubles (the paper's kappa)."""


def full_round(kind: Literal["one-bit-adam", "zero-one-adam"], step: int, warmup_steps: int) -> bool:
    """Whether step ``step`` (from 0) exchanges whole gradients and updates the variance."""
    if kind == "one-bit-adam":
        return step < warmup_steps
    return step < warmup_steps or step in _refreshes(max(1024, 1 << step.bit_length()))


@lru_cache(maxsize=8)
def _refreshes(limit: int) -> frozenset[int]:
    """Full rounds of 0/1 Adam before step ``limit``."""
    steps, step = [], 0
    while step < limit:
        steps.append(step)
        step += 2 ** ((len(steps) - 1) // REFRESHES_BEFORE_DOUBLING)
    return frozenset(steps)
