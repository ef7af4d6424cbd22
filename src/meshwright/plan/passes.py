"""In which order a stage runs its forward and backward passes, as far as traffic depends on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.job.job import Job
from meshwright.job.layout import SPLIT_BACKWARD_SCHEDULES
from meshwright.plan.place import Place, StagePlace
from meshwright.schedule.orders import KINDS
from meshwright.schedule.table import table


@dataclass(frozen=True)
class Passes:
    """The passes of one stage in one step."""

    micro_batches: int
    split: int
    """Backward passes that take input and weight gradients apart."""
    frees: bool
    """ZeRO-3: parameters are freed after use and gathered again."""
    keeps_last: bool
    """Without a pipeline backward follows forward at once: the last layer's parameters stay between them."""
    forwards_after_backward: int
    """Forward passes right behind a backward pass of the same stage (the first one included)."""
    backwards_after_backward: int
    """Backward passes right behind another."""
    ends_with_weights: bool = False
    """The last pass of the step is the weight part of a backward pass."""

    def layer_gathers(self, layers: int) -> tuple[int, int]:
        """How often layers are gathered, all together: in forward, in backward."""
        if not self.frees:
            return layers, 0
        again = layers - 1 if self.keeps_last else layers
        return self.micro_batches * layers, self.micro_batches * again

    def rest_gathers(self) -> tuple[int, int]:
        """How often what is outside the layers is gathered: kept from forward to backward, freed by backward."""
        return (self.forwards_after_backward, self.backwards_after_backward) if self.frees else (1, 0)


def passes_of(job: Job, place: Place, stage: StagePlace) -> Passes:
    """The passes of a stage under the job's schedule."""
    layout = job.layout
    frees = layout.zero == 3
    splits = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES and not _whole(place, stage)
    m = place.micro_batches
    if not splits and (layout.pp == 1 or not frees):
        return Passes(m, 0, frees, layout.pp == 1, m, 0)
    order = table(layout.schedule, layout.pp, layout.virtual_stages, m)
    kinds = order.kind[order.stage == stage.number]
    split = int(np.sum(kinds == KINDS.index("I"))) if splits else 0
    backward = kinds != KINDS.index("F")
    before = np.concatenate([[True], backward[:-1]])
    return Passes(
        micro_batches=m,
        split=split,
        frees=frees,
        keeps_last=False,
        forwards_after_backward=int(np.sum(before & ~backward)),
        backwards_after_backward=int(np.sum(before & backward)),
        ends_with_weights=splits and bool(kinds[-1] == KINDS.index("W")),
    )


def _whole(place: Place, stage: StagePlace) -> bool:
    """Whether a stage takes both halves of backward together whatever the schedule says.

    The first stage needs no input gradient. A stage that recomputes something with parameters in it would have to do
    so for each half.
    """
    return stage.first or stage.recompute == "full" or (stage.recompute == "selective" and place.spec.qk_norm)
