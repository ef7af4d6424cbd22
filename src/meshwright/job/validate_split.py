"""The rules of unequal batches with the rest of a job, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.job.job import Job
from meshwright.job.split import row_unit

_MOST_NAMED = 6
"""Legal sums that a sentence lists."""


def split_problems(job: Job) -> Iterator[str]:
    """Everything in ``batch.split`` and ``batch.micro_batch_limits`` that does not fit a job whose layout is filled."""
    batch, dp = job.batch, job.layout.dp
    if batch.split is None:
        if batch.micro_batch_limits is not None:
            yield (
                f"batch.micro_batch_limits: {_shown(batch.micro_batch_limits)} is not used without batch.split; leave "
                'it out, or give split = "auto" or shares'
            )
        return
    if batch.split != "auto":
        yield from _share_problems(job, batch.split)
    if batch.micro_batch_limits is not None:
        yield from _limit_problems(job, batch.micro_batch_limits)
    if job.train.deterministic:
        yield (
            f"batch.split: {_shown(batch.split)} cuts the batch into micro-batches of unequal size, but "
            f"train.deterministic=true needs one size, so that dp={dp} changes no bit; leave split out, or use "
            "deterministic=false"
        )
    strategy: str = job.sync.strategy
    if strategy != "all-reduce":
        yield (
            f"batch.split: {_shown(batch.split)} divides each global batch over ranks that sum in every step, which "
            f"they do not with sync.strategy={strategy}; leave split out, or use strategy=all-reduce"
        )


def _share_problems(job: Job, shares: Sequence[int]) -> Iterator[str]:
    dp, size, total = job.layout.dp, job.batch.global_size, sum(shares)
    if len(shares) != dp:
        yield (
            f"batch.split: {_shown(shares)} has {len(shares)} shares, but dp={dp} ({job.source('layout.dp')}); give "
            f"{dp}, one for each data-parallel rank"
        )
    if not total:
        yield f"batch.split: {_shown(shares)} gives no rank anything; use shares of which one is at least 1"
    elif size % total:
        legal = [sum_ for sum_ in range(size, 0, -1) if size % sum_ == 0][:_MOST_NAMED]
        yield (
            f"batch.split: {_shown(shares)} adds up to {total}, which does not divide batch.global_size={size}; use "
            f"shares that add up to {' or '.join(map(str, legal))}, or a global_size that {total} divides"
        )


def _limit_problems(job: Job, limits: Sequence[int]) -> Iterator[str]:
    dp, tp, sequence = job.layout.dp, job.layout.tp, job.data.sequence_length
    if len(limits) != dp:
        yield (
            f"batch.micro_batch_limits: {_shown(limits)} has {len(limits)} entries, but dp={dp} "
            f"({job.source('layout.dp')}); give {dp}, one for each data-parallel rank"
        )
    unit = row_unit(sequence, tp)
    if any(limit % unit for limit in limits):
        yield (
            f"batch.micro_batch_limits: {_shown(limits)} with data.sequence_length={sequence} has micro-batches whose "
            f"tokens tp={tp} does not divide; use multiples of {unit}"
        )


def _shown(value: str | Sequence[int]) -> str:
    return value if isinstance(value, str) else ",".join(map(str, value))
