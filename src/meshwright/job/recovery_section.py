"""[recovery]: what happens when a rank fails."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator, model_validator

from meshwright.job.sections import Positive, Section

Above1 = Annotated[float, Field(gt=1, allow_inf_nan=False)]
Score = Annotated[float, Field(gt=0, le=1)]


class RecoverySection(Section):
    """[recovery]: what happens when a rank fails."""

    restarts: NonNegativeInt = 3
    """Restarts in a row without a new step; then the run ends with the first cause. 0: never restart."""
    start: Literal["warm", "cold"] = "warm"
    """``warm``: ranks are forked from a process that has loaded everything, which waits for the next failure."""
    replacements: NonNegativeInt | None = None
    """Ranks that may be replaced in the whole run; then the layout is planned anew for those left. Absent: any."""
    rejoin_after: Positive | None = None
    """Seconds on fewer ranks after which, at the next step, the first layout is tried again; absent: never."""
    stopped_after: Positive = 30.0
    """Seconds that a rank may be stopped (SIGSTOP, a debugger) before it is replaced."""
    hang_after: Positive = 300.0
    """Seconds without a sign of life, or of all ranks waiting for each other, before the hung rank is replaced."""
    setup_after: Positive = 1500.0
    """The same at the start of a rank, and while a checkpoint is written."""
    collective_after: Positive = 1800.0
    """Seconds after which a collective gives up by itself, wherever it runs."""
    handover: Positive = 15.0
    """Seconds that the other ranks have to hand over their state before they are ended."""
    memory: bool = True
    """Take the state from the memory of living replicas, where they hold all of it, rather than from the disk."""
    memory_every: PositiveInt | None = None
    """Steps between copies of the state into memory that outlives its rank; absent: none. Not with compression or
    replicas that train apart."""
    digest_every: PositiveInt | None = None
    """Steps between comparisons of what replicas hold, bit by bit, and before each checkpoint; absent: never. Not with
    replicas that train apart."""
    outlier: Above1 | None = None
    """A rank whose gradient norm is more than so many times the median of its replicas' is reported; absent: never.
    Not with compression, replicas that train apart or in deterministic mode."""
    replay: bool = False
    """A step with such a rank is computed again from the same state, and must come to the same gradients."""
    straggler_score: Score = 0.5
    """A rank is reported as slow when the fastest needs less than this fraction of its time (and 0.1 s less a step)."""
    straggler_steps: PositiveInt = 10
    """Steps whose median counts."""
    alert_command: str | None = None
    """Shell command run for each alert, which it gets as JSON on its standard input."""
    alert_webhook: str | None = None
    """URL to which each alert is posted as JSON."""
    alert_timeout: Positive = 10.0
    """Seconds that a command or a webhook may take."""

    @field_validator("alert_command", "alert_webhook")
    @classmethod
    def _says_something(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if info.field_name == "alert_webhook" and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", value):
            raise ValueError(f'"{value}" is no URL to post to; give one such as http://127.0.0.1:9000/alerts')
        if not value.strip():
            raise ValueError(f'"{value}" is no command; give one, or leave it out')
        return value

    @model_validator(mode="after")
    def _replay_needs_a_suspect(self) -> RecoverySection:
        if self.replay and self.outlier is None:
            raise ValueError("replay = true needs outlier, which says what step is suspect; give it, such as 10.0")
        return self

    @model_validator(mode="after")
    def _in_order(self) -> RecoverySection:
        names = ("stopped_after", "hang_after", "setup_after", "collective_after")
        for lower, upper in pairwise(names):
            low, high, last = getattr(self, lower), getattr(self, upper), upper == names[-1]
            if low > high or (last and low == high):
                raise ValueError(
                    f"{lower} = {low:g} s must be {'below' if last else 'at most'} {upper} = {high:g} s, "
                    f"or the later limit would act first; "
                    f"use {' <= '.join(names[:3])} < {names[3]}"
                )
        if self.handover >= self.hang_after:
            raise ValueError(
                f"handover = {self.handover:g} s must be below hang_after = {self.hang_after:g} s; lower handover"
            )
        return self
