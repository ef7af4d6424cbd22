"""Which step of a run is a steady one: warm-ups over, and replicas that train apart meeting in it."""

from __future__ import annotations

from meshwright.job.adam_rounds import full_round
from meshwright.job.job import Job
from meshwright.job.validate_less_often import apart


def steady_step(job: Job, least: int) -> int:
    """The first steady step (counted from 1) that is at least ``least``."""
    sync = job.sync
    if apart(job):
        least = max(least, sync.synchronous_steps + 1)
        return -(-least // sync.period) * sync.period
    if sync.compression == "none":
        return least
    least = max(least, sync.compression_warmup_steps + 1)
    if sync.compression == "zero-one-adam":  # its whole gradients come back, ever more rarely, after the warm-up
        while full_round(sync.compression, least - 1, sync.compression_warmup_steps):
            least += 1
    return least
