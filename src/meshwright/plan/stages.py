"""What the pipeline ranks hold: layers, embedding and head of the first, second and last of them, as columns.

Between the first and the last pipeline rank all are alike up to a layer, and the second holds as much as any, so
three ranks stand for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.job.layout import DELAYED_SCHEDULES, V_SCHEDULES
from meshwright.plan.arrays import SCHEDULES, Bools, Floats, Ints, Layouts
from meshwright.plan.shape import Shape, Value

_DELAYED_CODES = [SCHEDULES.index(name) for name in SCHEDULES if name in DELAYED_SCHEDULES]
_V_CODES = [SCHEDULES.index(name) for name in SCHEDULES if name in V_SCHEDULES]


@dataclass(frozen=True)
class Held:
    """What one pipeline rank of each layout holds."""

    rank: Ints
    layers: Floats
    embedding: Bools
    head: Bools


def is_delayed(layouts: Layouts) -> Bools:
    """Layouts whose schedule lets steps overlap, so that parameters and gradients are there twice."""
    return np.isin(layouts.schedule, _DELAYED_CODES) & (layouts.pp > 1)


def is_v(layouts: Layouts) -> Bools:
    """Layouts whose schedule folds the stages back, so that the first rank also holds the last stage."""
    return np.isin(layouts.schedule, _V_CODES) & (layouts.pp > 1)


def held(layouts: Layouts, layers: Value) -> tuple[Held, Held, Held]:
    """The first, second and last pipeline rank (the same one where there are fewer)."""
    total = np.asarray(layers, np.int64)
    folded = is_v(layouts)
    ranks = (np.zeros_like(layouts.pp), np.minimum(1, layouts.pp - 1), layouts.pp - 1)
    return tuple(  # type: ignore[return-value]
        Held(
            rank=rank,
            layers=_layers(layouts, total, rank, folded).astype(float),
            embedding=rank == 0,
            head=np.where(folded, rank == 0, rank == layouts.pp - 1),
        )
        for rank in ranks
    )


def _layers(layouts: Layouts, layers: Ints, rank: Ints, folded: Bools) -> Ints:
    """Layers of pipeline rank ``rank``, with the boundaries of ``arrays.stage_counts``."""
    stages = layouts.pp * layouts.virtual
    base, extra = layers // stages, layers % stages
    others = np.maximum(1, stages - 1)
    rest = layers - (base - layouts.last_fewer)
    shorter = (layouts.last_fewer > 0) & (stages > 1)
    # Plain: stages 0 .. extra-1 have one more. Shorter last: stages 1 .. extra-of-the-others have one more.
    low = np.where(shorter, 1, 0)
    high = np.where(shorter, rest % others, extra - 1)
    each = np.where(shorter, rest // others, base)
    mirror = 2 * layouts.pp - 1 - rank
    looped = _count(low, high, rank, layouts.pp)
    both = ((rank >= low) & (rank <= high)).astype(np.int64) + ((mirror >= low) & (mirror <= high))
    held = layouts.virtual * each + np.where(folded, both, looped)
    has_last = np.where(folded, rank == 0, rank == layouts.pp - 1)
    return held + np.where(shorter & has_last, (base - layouts.last_fewer) - each, 0)


def _count(low: Ints, high: Ints, residue: Ints, modulus: Ints) -> Ints:
    """How many of ``low .. high`` leave ``residue``."""

    def up_to(value: Ints) -> Ints:
        return (value - residue) // modulus + 1

    return np.where(high >= low, np.maximum(up_to(high), 0) - np.maximum(up_to(low - 1), 0), 0)


def uneven_stages(layouts: Layouts, layers: Value, rank: Ints) -> tuple[Floats, Floats, Floats]:
    """Layers of a rank's smaller stages, and how many of its stages hold one more: among all, and its first.

    Of ``virtual`` stages a rank; where stages are even, or one a rank, all of them are the smaller ones.
    """
    total = np.asarray(layers, np.int64)
    base, extra = total // layouts.stage_total, total % layouts.stage_total
    folded = is_v(layouts)
    first = (rank < extra).astype(np.int64)
    more = np.where(folded, first + (2 * layouts.pp - 1 - rank < extra), _count(0 * extra, extra - 1, rank, layouts.pp))
    return base.astype(float), more.astype(float), first.astype(float)


def rank_parameters(shape: Shape, layouts: Layouts, rank: Held) -> Floats:
    """Parameters of one pipeline rank, before sharding."""
    tp = layouts.tp
    per_layer = shape.split_parameters() / tp + shape.whole_parameters()
    # A tied head is the embedding where both stand on one rank.
    head = rank.head * (1.0 - shape.tied * rank.embedding)
    ends = (rank.embedding + head) * shape.vocabulary / tp + rank.embedding * shape.positions
    return np.asarray(rank.layers * per_layer + ends * shape.hidden)
