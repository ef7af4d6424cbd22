"""The learning rate of a step: a pure function of the step number, so resume and layout cannot shift it."""

from __future__ import annotations

import math
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine", "wsd"]


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: ScheduleName,
    total_steps: int,
    warmup_steps: int,
    decay_steps: int | None,
    min_ratio: float,
) -> float:
    """The learning rate used by step ``step`` (the first step is 0).

    Warm-up is linear: step ``s < warmup_steps`` uses ``peak * (s + 1) / warmup_steps``. Afterwards

    - ``constant`` stays at ``peak``;
    - ``linear`` and ``cosine`` (Loshchilov and Hutter 2017, SGDR, without restarts) fall to
      ``peak * min_ratio`` over the ``decay_steps`` after warm-up (absent: all that remain) and stay there;
    - ``wsd`` (warm-up, stable, decay; Hu et al. 2024, MiniCPM) stays at ``peak`` and falls linearly to
      ``peak * min_ratio`` over the last ``decay_steps`` steps (absent: the last fifth).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "wsd":
        length = max(1, total_steps // 5) if decay_steps is None else decay_steps
        start = total_steps - length
    else:
        length = max(1, total_steps - warmup_steps) if decay_steps is None else decay_steps
        start = warmup_steps
    progress = min(max((step - start) / length, 0.0), 1.0) if length else float(step >= start)
    if schedule == "cosine":
        fall = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        fall = 1.0 - progress
    return peak * (min_ratio + (1.0 - min_ratio) * fall)
