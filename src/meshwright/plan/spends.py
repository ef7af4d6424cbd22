"""The ledger's *spends* as the planner predicts them: the parts of a step, of one rank.

The step takes all ranks equally long. What differs between them is what they hold: a pipeline rank with less to do
computes less and waits more.
"""

from __future__ import annotations

from meshwright.job.cluster import ClusterSpec
from meshwright.job.grid import coordinates
from meshwright.job.job import Job
from meshwright.ledger.ledger import Spends
from meshwright.plan.arrays import Work, from_layouts
from meshwright.plan.evaluate import evaluate
from meshwright.plan.shape import Shape

_COMPUTE = ("forward", "backward", "recompute", "optimizer")
_AXES = ("tp", "shard", "replicate", "pp")
_OF_LAYERS = ("forward", "backward", "recompute", "tp")
"""What a pipeline rank has in proportion to the layers (and the head) it holds."""


def predicted_spends(job: Job, cluster: ClusterSpec, rank: int) -> Spends:
    """Where a step's wall time goes on ``rank``.

    Args:
        job: resolved; its layout is what is timed.
        cluster: the machines, usually from ``meshwright calibrate``.
        rank: of the layout.

    Raises:
        ValueError: the layout has no columns (see ``from_layouts``).
    """
    work = Work.of(job)
    layouts = from_layouts([job.layout], work)
    answer = evaluate(work, cluster, layouts)
    parts = {name: float(part[0]) for name, part in answer.time.items()}
    less = 0.0
    if job.layout.pp > 1:
        # The parts are those of the busiest pipeline rank.
        share = _share(job, work, coordinates(job.layout, rank).pp)
        for name in _OF_LAYERS:
            less += (1 - share) * parts.get(name, 0.0)
            parts[name] = share * parts.get(name, 0.0)
    return Spends(
        wall=float(answer.step_time[0]),
        compute={name: parts[name] for name in _COMPUTE if parts.get(name)},
        communication={_axis(name, job): parts[name] for name in _AXES if parts.get(name)},
        waiting=parts.get("waiting", 0.0),
        bubble=parts.get("bubble", 0.0) + less,
        other=parts.get("other", 0.0),
    )


def _share(job: Job, work: Work, pp_rank: int) -> float:
    """What pipeline rank ``pp_rank`` has to compute, over what the busiest has; by matrix products."""
    shape, layout = Shape.of(work), job.layout
    layer = work.sequence * float(shape.matrix_flops()) + float(shape.attention_flops())
    head = work.sequence * 2.0 * float(shape.hidden) * float(shape.vocabulary)
    stages = layout.stage_layers(work.spec.layers)

    def load(rank: int) -> float:
        mine = layout.stages_of(rank)
        return sum(len(stages[stage]) for stage in mine) * layer + (layout.stage_count - 1 in mine) * head

    return load(pp_rank) / max(load(rank) for rank in range(layout.pp))


def _axis(name: str, job: Job) -> str:
    """As the measured ledger names it: without sharded state gradients are reduced over all of ``dp``."""
    return "dp" if name == "replicate" and job.layout.zero == 0 else name
