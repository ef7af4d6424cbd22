"""The [batch] section of a job file: how many sequences a step has, and how many of them each replica computes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from meshwright.job.sections import Section


class BatchSection(Section):
    """[batch]: the global batch, whatever the layout, and the replicas' shares of it."""

    global_size: PositiveInt
    """Sequences per optimizer step over all ranks."""
    split: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] | Literal["auto"] | None = None
    """Shares of the dp ranks in each global batch, such as ``[1, 3]``; ``auto``: by measured speed; absent: equal."""
    micro_batch_limits: Annotated[tuple[PositiveInt, ...], Field(strict=False)] | None = None
    """With ``split``: most sequences of a micro-batch on each dp rank; absent: ``layout.micro_batch`` on all."""

    @field_validator("split", "micro_batch_limits", mode="before")
    @classmethod
    def _empty_is_absent(cls, value: object) -> object:
        return None if value in ([], ()) else value
