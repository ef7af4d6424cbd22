"""The rules of compressed gradients with the rest of a job, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.job.job import Job
from meshwright.job.memory import local_elements, pipeline_rank_elements
from meshwright.job.sync_keys import KEYS_OF, LEVEL_AND_WARMUP, MOMENTUM_ONLY, REPLICA_STRATEGIES
from meshwright.job.validate_nodes import slow_level_problems

LEAST_ELEMENTS = 65_536
"""A rank with fewer has nothing to win: its gradients are one message, which costs its latency, not its length."""


def compression_problems(job: Job) -> Iterator[str]:
    """Everything about ``sync.compression`` that does not fit the rest of a job whose layout is filled."""
    kind = job.sync.compression
    yield from _unused_keys(job)
    if kind == "none":
        return
    layout = job.layout
    if layout.dp == 1:
        others = f" (the {layout.ranks} ranks are of tp and pp)" if layout.ranks > 1 else ""
        yield f"sync.compression: {kind} has nothing to send with dp=1{others}; use none, or dp of at least 2"
        return
    least = min(pipeline_rank_elements(job.model_spec, layout))
    if least < LEAST_ELEMENTS:
        yield (
            f"sync.compression: {kind} saves nothing on the {least:,} parameters of a rank, whose gradients cost the "
            f"latency of a message and not its length; use none, or ranks with at least {LEAST_ELEMENTS:,}"
        )
    if job.train.deterministic:
        yield (
            f"sync.compression: {kind} depends on dp, but train.deterministic=true promises bits that do not; "
            "use compression=none, or deterministic=false"
        )
    if job.precision.dtype == "float16":
        yield (
            f"sync.compression: {kind} would keep residuals in units of a loss scale that changes, with "
            "precision.dtype=float16; use bfloat16 or float32, or compression=none"
        )
    if job.sync.algorithm != "auto" and job.sync.strategy not in REPLICA_STRATEGIES:
        yield (
            f"sync.compression: {kind} has an exchange of its own, so sync.algorithm={job.sync.algorithm} has no sum "
            "to take; use algorithm=auto, or compression=none"
        )
    if job.sync.strategy not in REPLICA_STRATEGIES:
        yield from _of_gradients(job)


def _unused_keys(job: Job) -> Iterator[str]:
    kind = job.sync.compression
    for key, value in job.sync.changed(*KEYS_OF).items():
        if kind not in (kinds := KEYS_OF[key]):
            yield (
                f"sync.{key}: {value} is not used by sync.compression={kind}; leave it out, or use "
                f"compression={', '.join(kinds[:-1])}{' or ' if len(kinds) > 1 else ''}{kinds[-1]}"
            )
    if kind == "none":
        for key, value in job.sync.changed(*LEVEL_AND_WARMUP).items():
            yield f"sync.{key}: {value} needs a compression, but sync.compression=none; leave it out"


def _of_gradients(job: Job) -> Iterator[str]:
    kind, layout, optimizer = job.sync.compression, job.layout, job.optimizer
    shards = layout.shard_degree if layout.zero else 1
    if job.sync.compression_level == "slow":
        yield from slow_level_problems(job)
    if kind in MOMENTUM_ONLY:
        yield from _of_momentum(job, shards)
    if not job.sync.momentum_masking and kind == "dgc" and not optimizer.momentum:
        yield (
            f"sync.momentum_masking: false is of a momentum that {optimizer.name} leaves to itself or does not have; "
            "leave it out, or use optimizer.name=sgd with a momentum"
        )
    warmup, steps = job.sync.compression_warmup_steps, job.train.steps
    if warmup >= steps:
        yield (
            f"sync.compression_warmup_steps: {warmup} is not below train.steps={steps}, so {kind} would never be "
            f"in force; use at most {steps - 1}, or compression=none"
        )
    partial = layout.tp * layout.pp > 1 or (layout.zero >= 2 and shards > 1)
    if kind == "dgc" and optimizer.clip_norm is not None and partial:
        yield (
            f"sync.compression: dgc clips on each rank before it chooses (optimizer.clip_norm="
            f"{optimizer.clip_norm:g}), and under layout {layout} no rank has all of its gradients then; "
            "leave clip_norm out, or use tp=1 pp=1 and zero=0 or 1"
        )
    if kind == "powersgd":
        yield from _of_matrices(job, shards)


def _of_momentum(job: Job, shards: int) -> Iterator[str]:
    kind, optimizer = job.sync.compression, job.optimizer
    if optimizer.name != "adamw":
        yield (
            f"sync.compression: {kind} sends the momentum of Adam, but optimizer.name={optimizer.name}; use adamw, or "
            "compression=sign"
        )
        return
    if shards > 1:
        yield (
            f"sync.compression: {kind} needs all of the momentum on every rank, but zero={job.layout.zero} shards it "
            f"over {shards} ranks; use zero=0, or compression=sign"
        )
    if optimizer.clip_norm is not None:
        yield (
            f"sync.compression: {kind} has no gradient for optimizer.clip_norm={optimizer.clip_norm:g} to limit; "
            "leave clip_norm out, or use compression=sign"
        )
    if kind == "one-bit-adam" and not job.sync.compression_warmup_steps:
        yield (
            "sync.compression_warmup_steps: 0 leaves one-bit-adam without a variance; give at least 1 step of "
            "whole gradients (the paper's are about a fifth of the run)"
        )


def _of_matrices(job: Job, shards: int) -> Iterator[str]:
    layout, sync = job.layout, job.sync
    if layout.zero == 1 and 1 < shards < layout.dp:
        yield (
            f"sync.compression: powersgd needs whole matrices, but zero=1 with shard={shards} below dp={layout.dp} "
            f"cuts them where chunks end; use zero=0, 2 or 3, or shard={layout.dp}"
        )
    shapes = [
        (local_elements(name, shape, layout.tp) // shape[1], shape[1])
        for name, shape in job.model_spec.parameters()
        if len(shape) == 2
    ]
    parts = shards if layout.zero >= 2 else 1
    most = max(
        (_largest_rank(-(-rows // parts), columns, sync.compression_least_saving) for rows, columns in shapes),
        default=0,
    )
    if sync.compression_least_saving and sync.compression_rank > most:
        yield (
            f"sync.compression_rank: {sync.compression_rank} saves {sync.compression_least_saving:g} times the bytes "
            f"(sync.compression_least_saving) of no matrix of the model; "
            + (f"use at most {most}" if most else "use another compression")
        )


def _largest_rank(rows: int, columns: int, least_saving: float) -> int:
    """The largest rank at which a matrix still saves that much."""
    return int(rows * columns / ((rows + columns) * least_saving)) if least_saving else min(rows, columns)
