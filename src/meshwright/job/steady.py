"""Which step of a run is a steady one: warm-ups over, and replicas that train apart meeting in it."""

from __future__ import annotations

from meshwright.job.job import Job
from meshwright.job.validate_less_often import apart

_REFRESHES = 16
"""0/1 Adam sums whole gradients in its first 17 steps and in every other one afterwards."""


def steady_step(job: Job, least: int) -> int:
    """The first steady step (counted from 1) that is at least ``least``."""
    sync = job.sync
    if apart(job):
        least = max(least, sync.synchronous_steps + 1)
        return -(-least // sync.period) * sync.period
    if sync.compression == "none":
        return least
    least = max(least, sync.compression_warmup_steps + 1)
    return max(least, _REFRESHES + 2) if sync.compression == "zero-one-adam" else least
