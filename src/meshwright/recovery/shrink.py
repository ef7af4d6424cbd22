"""A job for fewer ranks, near the one there was, when no planner is asked.

Replicas that train apart stay whole: ``shard`` stays, and their number falls. What [sync] asks for may need more ranks
than are left (compression of one rank's gradients, a node of ranks that are no more); then those of its keys go back to
their defaults, and what depends on them with them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.job.split import for_other_replicas
from meshwright.job.sync_keys import STRATEGY_KEYS, CompressionKeys
from meshwright.job.validate import problems
from meshwright.job.validate_less_often import apart

_GO_WITH: dict[str, tuple[str, ...]] = {
    "strategy": (*STRATEGY_KEYS, *CompressionKeys.model_fields),  # what compressed outer gradients is not for others
    "group_size": ("group_period",),
    "node_size": ("algorithm", "compression_level"),
}
"""Keys that mean nothing without another; the rest are refused by their own sentences."""


def fewer_ranks(job: Job, ranks: int) -> Job | None:
    """The job on at most ``ranks`` ranks; None when none of its layouts fits.

    Most ranks come first; among layouts of as many, the one that gives up data parallelism only, then the one that
    keeps most of the tensor, then of the pipeline parallelism. Fewer data parallel ranks are taken where more of
    [sync] stays with them.
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
        if pp == 1 and layout.delayed:
            continue  # it would no longer take its gradients one update late: another recursion
        found = _with_degrees(job, dp, tp, pp)
        if found is not None and any(_given_up(job, found)):
            # With one data parallel rank [sync] does nothing, however much of it may stay.
            fewer = (_with_degrees(job, other, tp, pp) for other in range(dp - 1, 1, -1))
            return min((found, *filter(None, fewer)), key=lambda each: _given_up(job, each))
        if found is not None:
            return found
    return None


def set_back(before: Job, after: Job) -> tuple[dict[str, object], list[str]]:
    """The keys of [sync] that went back to their defaults, with what they were; and why, a clause each."""
    keys = {
        f"sync.{key}": value
        for key in type(before.sync).model_fields
        if (value := getattr(before.sync, key)) != getattr(after.sync, key)
    }
    if not keys:
        return {}, []
    refused = problems(before.with_layout(after.layout), None, "", "train")
    return keys, [sentence.partition(";")[0] for sentence in refused if sentence.startswith("sync.")]


def _given_up(job: Job, smaller: Job) -> tuple[int, bool]:
    """How many keys of [sync], and whether replicas are of another size."""
    return len(set_back(job, smaller)[0]), _shard_is_of_sync(job) and smaller.layout.shard != job.layout.shard


def _shard_is_of_sync(job: Job) -> bool:
    """Whether ``shard`` says who is near: the ranks of one replica, or those that sum whole."""
    return job.layout.shard is not None and (apart(job) or job.sync.compression_level == "slow")


def _with_degrees(job: Job, dp: int, tp: int, pp: int) -> Job | None:
    """The job with these degrees and as much of [sync] as goes with them; None where they do not fit it."""
    base = job if dp == job.layout.dp else for_other_replicas(job)
    base = base.model_copy(update={"cluster": job.cluster.model_copy(update={"ranks": None})})
    shard = job.layout.shard
    if _shard_is_of_sync(job) and shard is not None and dp % shard == 0:
        whole, wrong = _resolved(base, _smaller(base.layout, dp, tp, pp, shard))
        if whole is not None:
            return whole
    smaller = _smaller(base.layout, dp, tp, pp, None)
    found, wrong = _resolved(base, smaller)
    while found is None and (misfits := _misfits(base, wrong)):
        defaults = {key: type(base.sync).model_fields[key].default for key in misfits}
        base = base.model_copy(update={"sync": base.sync.model_copy(update=defaults)})
        found, wrong = _resolved(base, smaller)
    return found


def _smaller(layout: Layout, dp: int, tp: int, pp: int, shard: int | None) -> Layout:
    changes: dict[str, object] = {"dp": dp, "tp": tp, "pp": pp, "shard": shard, "placement": None, "stages": None}
    if pp == 1:
        changes |= {"schedule": "1f1b", "virtual": None}
    if dp == 1:
        changes |= {"zero": 0}
    if isinstance(layout.recompute, tuple):
        changes["recompute"] = layout.recompute[0]
    return layout.model_copy(update=changes)


def _resolved(job: Job, layout: Layout) -> tuple[Job | None, list[str]]:
    """The job under a layout, or what is wrong with that."""
    try:
        found = job.with_layout(layout, source="fewer ranks")
        return found.resolve(layout.ranks, ranks_from="the ranks left"), []
    except InputError as error:
        return None, str(error).split("\n")


def _misfits(job: Job, wrong: Sequence[str]) -> list[str]:
    """Keys of [sync] that the sentences name, and what goes with them, where set; none if more than [sync] is wrong."""
    named = [re.match(r"sync\.(\w+)", sentence) for sentence in wrong]
    keys = [match[1] for match in named if match is not None]
    if len(keys) < len(wrong):
        return []
    return [*job.sync.changed(*keys, *(other for key in keys for other in _GO_WITH.get(key, ())))]


def _down_from(degree: int) -> list[int]:
    return [smaller for smaller in range(degree, 0, -1) if degree % smaller == 0]
