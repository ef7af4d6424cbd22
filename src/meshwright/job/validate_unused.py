"""Keys that are set and would do nothing beside the others: refused, so that nobody takes them to be in force."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.job.job import Job
from meshwright.job.validate_server import unread_by_servers


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
