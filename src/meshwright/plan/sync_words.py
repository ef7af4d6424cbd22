"""What a predicted step time is, in words, where ranks do not simply sum whole gradients in every step."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.job.job import Job
from meshwright.job.sync_section import SyncSection
from meshwright.job.validate_less_often import apart, replica_count
from meshwright.plan.quantities import show_duration

LOSSES = (
    "Losses are not predicted: another algorithm may need more or fewer steps to the same loss; measure that before "
    "you believe its step time."
)
"""Beside whatever changes the update."""


def same_update(sync: SyncSection) -> bool:
    """Whether the update is that of one device: an exact sum in every step."""
    if sync.strategy == "server":
        return sync.server_mode == "synchronous" and not sync.backup_workers
    return sync.strategy == "all-reduce" and sync.compression == "none"


def sync_sentence(job: Job, step: float, parts: Mapping[str, float], warm: float | None) -> str:
    """What the step time of a layout stands for; "" where that goes without saying.

    Args:
        job: resolved.
        step: seconds.
        parts: of the step, by name.
        warm: seconds of a step of the warm-up; None: there is none.
    """
    sync = job.sync
    if sync.strategy == "server":
        said = _of_servers(job, step)
    elif apart(job):
        said = (
            f"{sync.strategy}: the step time is the mean over {sync.period} steps, {show_duration(_met(parts))} of it "
            f"for meetings of {replica_count(job.layout)} replicas"
        )
        if sync.overlap:
            said += f", beside what travels during {sync.overlap} steps of computation"
    elif sync.compression != "none":
        said = f"gradients travel as {sync.compression}"
        if sync.compression_level == "slow":
            said += " at the slower level alone"
    elif sync.algorithm not in ("auto", "direct", "backend"):
        return f"gradients are summed by {sync.algorithm}."
    else:
        return ""
    return " ".join([f"{said}.", *_warm(sync, warm), *([] if same_update(sync) else [LOSSES])])


def _met(parts: Mapping[str, float]) -> float:
    return parts.get("replicate", 0.0)


def _warm(sync: SyncSection, warm: float | None) -> list[str]:
    if warm is None:
        return []
    seconds = show_duration(warm)
    if sync.strategy != "all-reduce":
        return [f"The first {sync.synchronous_steps} steps sum gradients and take {seconds} each."]
    if sync.compression == "dgc":
        return [f"Over the first {sync.compression_warmup_steps} steps ever less travels, from {seconds} a step down."]
    if sync.compression == "zero-one-adam":
        count = max(17, sync.compression_warmup_steps)
        return [f"The first {count} steps, and ever rarer ones later, travel whole and take {seconds} each."]
    return [f"The first {sync.compression_warmup_steps} steps travel whole and take {seconds} each."]


def warms_up(sync: SyncSection) -> bool:
    """Whether the first steps of a run are unlike the others."""
    if sync.strategy == "local":
        return sync.synchronous_steps > 0
    if sync.strategy != "all-reduce" or sync.compression == "none":
        return False
    return sync.compression_warmup_steps > 0 or sync.compression == "zero-one-adam"


def _of_servers(job: Job, step: float) -> str:
    sync, workers = job.sync, job.layout.dp
    count = sync.servers * sync.server_replicas
    where = f"{count} server process{'es' if count > 1 else ''} on the first node"
    match sync.server_mode:
        case "synchronous":
            return f"the step time is pull, computation, push and update of {workers} workers in step, with {where}"
        case "stale-synchronous":
            return (
                f"the step time is that of one update in the mean, {workers} workers that wait for nobody while they "
                f"are at most {sync.staleness_bound} steps ahead, with {where}"
            )
        case _:
            return (
                f"the step time is a worker's own pace: in {show_duration(step)} each of {workers} workers pulls, "
                f"computes and pushes its share once, and {workers} updates are made, with {where}"
            )
