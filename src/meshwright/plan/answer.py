"""What planning answers: ranked layouts, the Pareto front, why the others were rejected. Its JSON is ``plan.json``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PlannedLayout(_Part):
    """One layout and what it is predicted to cost."""

    layout: str
    """Its short form; ``--layout`` reads it back, placement included."""
    fits: bool
    """The fullest rank needs at most what a device has."""
    step_time_s: float
    tokens_per_s: float
    """Of all devices."""
    mfu: float
    """Model FLOPs a second over the devices' dense peak."""
    peak_memory_bytes: int
    """Of the fullest rank: to the byte by the predicted ledger, but in ``Plan.pareto`` by the search's closed form."""
    fullest_rank: int
    """A global rank that holds as much as any."""
    binding: str
    """What takes most of the step beyond the matrix products, or memory."""
    useful_speedup: float | None = None
    """Predicted tokens/s over those predicted for one device, whether or not the model fits there."""
    efficiency: float | None = None
    """``useful_speedup`` over the number of devices."""
    warmup_step_time_s: float | None = None
    """Of the first steps, where [sync] has a warm-up; ``step_time_s`` is of the steps after it."""


class Rejected(_Part):
    """Why the layouts of one family are not the answer."""

    family: str
    """Degrees that all its layouts share."""
    kind: Literal["illegal", "memory", "slower"]
    layouts: int
    """How many were evaluated; 0 for a family that is illegal as a whole."""
    reason: str
    """The binding constraint in one line."""
    rank: int | None = None
    """The rank that it binds on."""
    closest: str | None = None
    """The family's best layout: the fastest that fits, or else the one that needs least memory."""
    lacks_bytes: int | None = None
    """How much memory the closest one lacks on its fullest rank."""


class Plan(_Part):
    """The answer to one question."""

    model: str
    cluster: str
    searched: int
    """Distinct legal layouts whose memory and step time were computed."""
    illegal: int
    """Layouts left out by a rule, counted apart."""
    seconds: float
    """How long that took."""
    layouts: tuple[PlannedLayout, ...]
    """Fastest first. When nothing fits: the one that comes closest, with ``fits`` false."""
    rejected: tuple[Rejected, ...]
    pareto: tuple[PlannedLayout, ...] = ()
    """No layout beats these in both time and memory; by rising memory."""
    points: tuple[tuple[float, float, bool, str], ...] = ()
    """A sample of all layouts: seconds a step, bytes, fits, family."""
    placement: str = ""
    """Which axes of the first layout are inside a node, and why."""
    sync: str = ""
    """What the step time of the first layout stands for, where gradients are not simply summed in every step."""
    basis: tuple[str, ...] = ()
    """What about the cluster was assumed, not given."""

    @property
    def fits(self) -> bool:
        """Some layout fits."""
        return bool(self.layouts) and self.layouts[0].fits

    def to_json(self) -> str:
        """As it stands in ``plan.json``."""
        return self.model_dump_json(indent=1) + "\n"
