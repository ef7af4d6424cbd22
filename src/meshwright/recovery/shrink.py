"""A layout for fewer ranks, near the one there was, when no planner is asked."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.job.split import for_other_replicas


def fewer_ranks(job: Job, ranks: int) -> Job | None:
    """The job on at most ``ranks`` ranks; None when none of its layouts fits.

    Most ranks come first; among layouts of as many, the one that gives up data parallelism only, then the one that
    keeps most of the tensor, then of the pipeline parallelism.
    """
    layout = job.layout
    candidates = {
        (dp, tp, pp)
        for pp in _down_from(layout.pp)
        for tp in _down_from(layout.tp)
        for dp in range(1, ranks // (tp * pp) + 1)
        if dp <= layout.dp
    }
    order = sorted(candidates, key=lambda c: (-c[0] * c[1] * c[2], layout.tp - c[1] + layout.pp - c[2], -c[1], -c[2]))
    for dp, tp, pp in order:
        changes: dict[str, object] = {"dp": dp, "tp": tp, "pp": pp, "shard": None, "placement": None, "stages": None}
        if pp == 1 and layout.delayed:
            continue  # it would no longer take its gradients one update late: another recursion
        if pp == 1:
            changes |= {"schedule": "1f1b", "virtual": None}
        if dp == 1:
            changes |= {"zero": 0}
        if isinstance(layout.recompute, tuple):
            changes["recompute"] = layout.recompute[0]
        base = job if dp == layout.dp else for_other_replicas(job)
        smaller = base.with_layout(base.layout.model_copy(update=changes), source="fewer ranks")
        smaller = smaller.model_copy(update={"cluster": job.cluster.model_copy(update={"ranks": None})})
        try:
            return smaller.resolve(dp * tp * pp, ranks_from="the ranks left")
        except InputError:
            continue
    return None


def _down_from(degree: int) -> list[int]:
    return [smaller for smaller in range(degree, 0, -1) if degree % smaller == 0]
