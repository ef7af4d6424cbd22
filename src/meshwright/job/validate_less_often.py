"""The rules of replicas that train apart with the rest of a job, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.job.sentences import either
from meshwright.job.sync_keys import CASTS, LEVEL_AND_WARMUP, REPLICA_STRATEGIES, STRATEGY_KEYS

_OUTER_COMPRESSION = ("none", "fp16", "bf16", "int8", "fp8", "sign", "dgc")


def momentum_in_compression(job: Job) -> bool:
    """Whether the compressor has the momentum of SGD: deep gradient compression of gradients, not of outer ones."""
    return job.sync.compression == "dgc" and not apart(job)


def apart(job: Job) -> bool:
    """Whether the replicas of a job train apart."""
    return job.sync.strategy in REPLICA_STRATEGIES


def replica_ranks(layout: Layout) -> int:
    """Data parallel ranks of one replica, where replicas train apart: ``shard``, or with zero=0 one."""
    if layout.shard is not None:
        return layout.shard
    return layout.dp if layout.zero else 1


def replica_count(layout: Layout) -> int:
    """Replicas that train apart."""
    return layout.dp // replica_ranks(layout)


def less_often_problems(job: Job) -> Iterator[str]:
    """Everything about replicas that train apart that does not fit the rest of a job whose layout is filled."""
    yield from _unused_keys(job)
    if not apart(job):
        return
    sync, layout = job.sync, job.layout
    if layout.dp % replica_ranks(layout):
        return  # said of the layout
    if replica_count(layout) < 2:
        yield (
            f"sync.strategy: {sync.strategy} needs at least 2 replicas, but dp={layout.dp} with zero={layout.zero} "
            f"and shard={layout.shard or 'none'} is one; use dp of at least 2, and with zero of at least 1 a "
            "shard below dp"
        )
        return
    if job.train.deterministic:
        yield (
            f"sync.strategy: {sync.strategy} depends on dp, but train.deterministic=true promises bits that do not; "
            "use strategy=all-reduce, or deterministic=false"
        )
    if sync.algorithm != "auto":
        yield (
            f"sync.strategy: {sync.strategy} meets by sums in rank order, so sync.algorithm={sync.algorithm} is not "
            "used; use algorithm=auto"
        )
    if sync.period > job.train.steps:
        yield (
            f"sync.period: {sync.period} is above train.steps={job.train.steps}, so replicas would not meet before the "
            f"end; use at most {job.train.steps}"
        )
    yield from _local_problems(job)
    yield from _outer_problems(job)
    if sync.strategy == "easgd" and sync.elasticity is not None:
        count = replica_count(layout)
        if sync.elasticity * count > 1:
            yield (
                f"sync.elasticity: {sync.elasticity:g} x {count} replicas moves the center by more than the replicas "
                f"brought; use at most {1 / count:g}"
            )


def _unused_keys(job: Job) -> Iterator[str]:
    sync = job.sync
    for key, value in sync.changed(*STRATEGY_KEYS).items():
        if sync.strategy not in (strategies := STRATEGY_KEYS[key]):
            yield (
                f"sync.{key}: {value} is not used by sync.strategy={sync.strategy}; leave it out, or use "
                f"strategy={' or '.join(strategies)}"
            )


def _local_problems(job: Job) -> Iterator[str]:
    sync, count = job.sync, replica_count(job.layout)
    if sync.strategy != "local":
        return
    if sync.synchronous_steps >= job.train.steps:
        yield (
            f"sync.synchronous_steps: {sync.synchronous_steps} is not below train.steps={job.train.steps}, so replicas "
            f"would never train apart; use at most {job.train.steps - 1}, or strategy=all-reduce"
        )
    if sync.average == "state" and job.optimizer.name == "sgd" and not job.optimizer.momentum:
        yield "sync.average: state is of moments, which sgd without momentum does not have; use parameters"
    if (sync.group_size is None) != (sync.group_period is None):
        missing = "group_period" if sync.group_period is None else "group_size"
        yield f"sync.{missing} is missing: group_size and group_period go together; give both, or neither"
    elif sync.group_size is not None and sync.group_period is not None:
        legal = [size for size in range(2, count) if count % size == 0]
        if sync.group_size not in legal:
            use = f"use {either(legal)}" if legal else "leave it out"
            yield f"sync.group_size: {sync.group_size} does not cut {count} replicas into groups of several; {use}"
        if sync.period % sync.group_period or sync.group_period == sync.period:
            legal = [period for period in range(1, sync.period) if sync.period % period == 0]
            yield (
                f"sync.group_period: {sync.group_period} is no part of sync.period={sync.period}; "
                + (f"use {either(legal)}" if legal else "use a period of at least 2, or leave both out")
            )


def _outer_problems(job: Job) -> Iterator[str]:
    sync, layout = job.sync, job.layout
    kind = sync.compression
    if sync.strategy != "diloco":
        if kind != "none":
            yield (
                f"sync.compression: {kind} does not go with strategy={sync.strategy}, which sends parameters and no "
                "gradients; use compression=none, or strategy=diloco"
            )
        return
    if kind not in _OUTER_COMPRESSION:
        yield (
            f"sync.compression: {kind} is not made for outer gradients (strategy=diloco); use "
            f"{', '.join(_OUTER_COMPRESSION[:-1])} or {_OUTER_COMPRESSION[-1]}"
        )
    elif kind not in ("none", *CASTS) and (layout.tp > 1 or (job.model_spec.tied and layout.stage_count > 1)):
        yield (
            f"sync.compression: {kind} looks at many elements at once, by which copies of one parameter on ranks of "
            f"layout {layout} would become different; use fp16, bf16 or none"
        )
    if not sync.momentum_masking:
        yield "sync.momentum_masking: outer gradients (strategy=diloco) have no momentum while they wait; leave it out"
    if kind != "none":
        for key, value in sync.changed(*LEVEL_AND_WARMUP).items():
            yield f"sync.{key}: {value} is not used by strategy=diloco, whose meetings are rare; leave it out"
    if sync.period % sync.fragments:
        yield f"sync.fragments: {sync.fragments} does not divide sync.period={sync.period}; use a divisor of it"
    elif sync.overlap >= sync.period // sync.fragments:
        most = sync.period // sync.fragments - 1
        yield (
            f"sync.overlap: {sync.overlap} steps are not below the {most + 1} between two meetings "
            f"(period={sync.period} / fragments={sync.fragments}); use at most {most}"
        )
