"""The rules of a schedule that lets steps overlap (``2bw``) with the rest of a job, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.job.job import Job

_NEAREST = "schedule=1f1b"
"""The schedule that is most like it and ends with each step."""


def delayed_problems(job: Job) -> Iterator[str]:
    """Everything that two versions of the parameters do not go with, in a job whose layout is filled."""
    if not job.layout.delayed:
        return
    yield from _model_problems(job)
    yield from _step_problems(job)
    strategy, compression = job.sync.strategy, job.sync.compression
    if strategy != "all-reduce":
        yield (
            f"sync.strategy: {strategy} changes parameters after a step, but with {_name(job)} the next step has begun "
            f"by then; use strategy=all-reduce, or {_NEAREST}"
        )
    elif compression != "none":
        yield (
            f"sync.compression: {compression} keeps residuals from step to step in one buffer, but with {_name(job)} "
            f"two steps sum in turn; use compression=none, or {_NEAREST}"
        )


def _name(job: Job) -> str:
    return f"schedule={job.layout.schedule}"


def _model_problems(job: Job) -> Iterator[str]:
    layout, name = job.layout, _name(job)
    if layout.zero >= 2 and layout.shard_degree > 1:
        yield (
            f"layout: zero={layout.zero} frees and gathers one set of parameters and gradients, but {name} keeps two "
            f"versions of both; use zero=0 or 1, or {_NEAREST}"
        )
    if job.model_spec.tied:
        yield (
            f"layout: {name} does not go with model.tied=true, because adding up the embedding's two gradients would "
            f"make the last stage wait for the first in every step; use tied=false, or {_NEAREST}"
        )
    if job.precision.dtype == "float16":
        yield (
            f"precision.dtype: float16 takes its loss scale from the step before, which has not ended when {name} "
            f"begins the next; use bfloat16, or {_NEAREST}"
        )
    if job.train.compile:
        yield (
            f"train.compile: true compiles each block for one set of parameters, but {name} keeps two; "
            f"use compile=false, or {_NEAREST}"
        )


def _step_problems(job: Job) -> Iterator[str]:
    name = _name(job)
    if job.batch.split is not None:
        yield (
            f"batch.split: shares of the batch may give steps unequal numbers of micro-batches, but {name} needs as "
            f"many in every step; leave split out, or use {_NEAREST}"
        )
    if job.recovery.outlier is not None:
        yield (
            f"recovery.outlier: {job.recovery.outlier:g} looks at a step before its update, but with {name} the next "
            f"step has begun by then; leave it out, or use {_NEAREST}"
        )
    for key in ("memory_every", "digest_every"):
        if (every := getattr(job.recovery, key)) is not None:
            yield (
                f"recovery.{key}: {every} compares or copies a state between steps, but with {name} ranks are at no "
                f"one step; leave it out, or use {_NEAREST}"
            )
    if job.fault.inject or job.fault.listen:
        yield (
            f"fault: a fault is addressed by a step and a phase, but with {name} a rank is in two steps at once; "
            f"leave [fault] out, or use {_NEAREST}"
        )
    if job.checkpoint.interval is not None:
        yield (
            f"checkpoint.interval: {job.checkpoint.interval} is due at a time that nobody knows when a step begins, "
            f"which {name} has to, so as to drain the pipeline; use checkpoint.every, or {_NEAREST}"
        )
