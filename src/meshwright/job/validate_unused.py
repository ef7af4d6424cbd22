"""Keys that are set and would do nothing beside the others: refused, so that nobody takes them to be in force."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.job.job import Job
from meshwright.job.validate_less_often import apart
from meshwright.job.validate_server import unread_by_servers
from meshwright.job.validate_sync import unused_sizes


def unused_problems(job: Job) -> Iterator[str]:
    """One sentence for each key with another value than its default that nothing would read."""
    optimizer, checkpoint = job.optimizer, job.checkpoint
    if optimizer.name == "adamw" and optimizer.momentum > 0:
        yield f"optimizer.momentum: {optimizer.momentum} is not used by adamw; use betas, or name=sgd"
    if optimizer.schedule == "constant":
        for key in ("min_lr_ratio", "decay_steps"):
            if value := getattr(optimizer, key):
                yield (
                    f"optimizer.{key}: {value} is not used by optimizer.schedule=constant; leave it out, or use "
                    "schedule=cosine, linear or wsd"
                )
    if job.precision.dtype != "float16":
        for key, value in job.precision.changed("loss_scale_initial", "loss_scale_growth_interval").items():
            yield (
                f"precision.{key}: {value} is not used by precision.dtype={job.precision.dtype}; leave it out, "
                "or use dtype=float16"
            )
    if checkpoint.mtbf_hours is not None and checkpoint.interval != "auto":
        yield (
            f"checkpoint.mtbf_hours: {checkpoint.mtbf_hours} is used by checkpoint.interval=auto alone; leave it out, "
            "or use interval=auto"
        )
    yield from unread_by_servers(job)
    yield from _unwatched(job)
    yield from unused_sizes(job).values()


def _unwatched(job: Job) -> Iterator[str]:
    """Keys of [recovery] that rest on replicas being alike, or on gradients of a rank's own, where there are none."""
    sync, recovery = job.sync, job.recovery
    if sync.strategy == "server":
        return  # said of [recovery] as a whole
    if apart(job):
        if recovery.digest_every is not None:
            yield (
                f"recovery.digest_every: {recovery.digest_every} compares replicas that hold the same, but with "
                f"sync.strategy={sync.strategy} they train apart; leave it out, or use strategy=all-reduce"
            )
        why, instead = f"sync.strategy={sync.strategy}", "strategy=all-reduce"
    elif sync.compression != "none":
        why, instead = f"sync.compression={sync.compression}", "compression=none"
    else:
        why, instead = "train.deterministic=true", "deterministic=false"
    if recovery.memory_every is not None and (apart(job) or sync.compression != "none"):
        yield (
            f"recovery.memory_every: {recovery.memory_every} copies parameters and moments, but with {why} each rank "
            f"has more of its own to go on from, which checkpoints alone hold; leave it out, or use {instead}"
        )
    if recovery.outlier is not None and (apart(job) or sync.compression != "none" or job.train.deterministic):
        keys = "it and recovery.replay" if recovery.replay else "it"
        yield (
            f"recovery.outlier: {recovery.outlier:g} looks at each rank's own gradients as they are summed, which "
            f"{why} does not show; leave {keys} out, or use {instead}"
        )
