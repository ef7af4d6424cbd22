"""The rules between fields of a job: checked before any process starts, all that is wrong at once."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.job.layout import LOOPED_SCHEDULES, SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES, Layout
from meshwright.job.memory import memory_problem
from meshwright.job.model_spec import ModelSpec
from meshwright.job.schedule_rules import micro_batch_rule, micro_steps
from meshwright.job.sentences import either
from meshwright.job.split import first_split
from meshwright.job.validate_delayed import delayed_problems
from meshwright.job.validate_less_often import apart
from meshwright.job.validate_split import split_problems
from meshwright.job.validate_sync import sync_problems
from meshwright.job.validate_unused import unused_problems

_FULL_BACKWARD = "gpipe, 1f1b, interleaved or looped-bfs"


def problems(job: Job, ranks: int | None, ranks_from: str, purpose: str) -> list[str]:
    """Everything that does not fit in a job whose layout is filled, one sentence each.

    Args:
        job: its layout has a micro-batch size.
        ranks: how many ranks there are; None: as many as the layout takes.
        ranks_from: who says so, for the message.
        purpose: "train", or "plan", which allows what cannot be trained yet.
    """
    found = [*_rank_problems(job, ranks, ranks_from)]
    if purpose == "train":
        found += _not_built(job)
    found += _tensor_problems(job)
    stages = [*_stage_problems(job.layout, job.model_spec)]
    found += stages
    if not stages:
        found += _batch_problems(job)
    found += _sharding_problems(job)
    found += _mode_problems(job)
    found += sync_problems(job)
    found += delayed_problems(job)
    if purpose == "train":
        found += _training_problems(job)
    if not found and job.cluster.memory_per_rank_bytes is not None:
        problem = memory_problem(job, job.cluster.memory_per_rank_bytes, "cluster.memory_per_rank_bytes")
        found += [problem] if problem else []
    return found


def check_job(job: Job, ranks: int | None = None, *, ranks_from: str = "the launcher", purpose: str = "train") -> None:
    """Refuse a job in which fields do not fit together.

    Raises:
        InputError: all that is wrong, one sentence a line.
    """
    found = problems(job, ranks, ranks_from, purpose)
    if found:
        raise InputError("\n".join(found))


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _rank_problems(job: Job, ranks: int | None, ranks_from: str) -> Iterator[str]:
    layout = job.layout
    if ranks is not None and ranks != layout.ranks:
        names = [name for name in ("dp", "tp", "pp", "cp") if name != "cp" or layout.cp > 1]
        product = " x ".join(f"{name}={getattr(layout, name)} ({job.source(f'layout.{name}')})" for name in names)
        plural = "rank" if ranks == 1 else "ranks"
        yield (
            f"layout: {product} is {layout.ranks} ranks, but there are {ranks} {plural} ({ranks_from}); "
            f"use degrees whose product is {ranks}, or {layout.ranks} ranks"
        )
    if layout.placement is not None and sorted(layout.placement) != list(range(layout.ranks)):
        yield (
            f"layout: placement={','.join(map(str, layout.placement))} does not name each rank once; "
            f"use some order of 0 to {layout.ranks - 1}"
        )


def _not_built(job: Job) -> Iterator[str]:
    layout, spec = job.layout, job.model_spec
    if layout.cp > 1:
        yield f"layout: cp={layout.cp} (context parallel) is not available yet; use 1"
    if layout.ep > 1:
        yield f"layout: ep={layout.ep} (expert parallel) is not available yet; use 1"
    if spec.experts:
        yield f"model: experts={spec.experts} can be planned but not trained yet; use a dense model (experts=0)"


def _tensor_problems(job: Job) -> Iterator[str]:
    spec, tp = job.model_spec, job.layout.tp
    # Key/value heads divide the attention heads, so what divides the former divides both.
    legal = either(_divisors(math.gcd(spec.kv_heads, spec.ffn_hidden)))
    if spec.kv_heads % tp:
        yield f"layout: tp={tp} does not divide {spec.kv_heads} key/value heads; use {legal}"
    elif spec.ffn_hidden % tp:
        yield f"layout: tp={tp} does not divide model.ffn_hidden={spec.ffn_hidden}; use {legal}"
    positions = job.data.sequence_length
    if spec.positions == "learned" and positions > spec.max_positions:
        yield (
            f"data.sequence_length: {positions} is above the {spec.max_positions} learned positions of the model "
            f"(model.max_positions); use 1 to {spec.max_positions}"
        )


def _stage_problems(layout: Layout, spec: ModelSpec) -> Iterator[str]:
    virtual, schedule = layout.virtual, layout.schedule
    if layout.pp == 1:
        if virtual is not None and virtual > 1:
            yield f"layout: virtual={virtual} needs a pipeline, but pp=1; use virtual=1, or pp of at least 2"
        if schedule != "1f1b":
            yield f"layout: schedule={schedule} needs a pipeline, but pp=1; leave schedule out, or use pp of at least 2"
    elif schedule in V_SCHEDULES and virtual not in (None, 2):
        yield f"layout: virtual={virtual} does not fit schedule={schedule}, which folds two stages a rank; use 2"
    elif schedule not in LOOPED_SCHEDULES | V_SCHEDULES and virtual not in (None, 1):
        yield (
            f"layout: virtual={virtual} does not fit schedule={schedule}, which has one stage a rank; use 1, or a "
            f"schedule of {', '.join(sorted(LOOPED_SCHEDULES | V_SCHEDULES))}"
        )
    count = layout.stage_count
    where = f"pp={layout.pp} x virtual={layout.virtual_stages} = {count} stages"
    if layout.stages is not None:
        shown = ",".join(map(str, layout.stages))
        if len(layout.stages) != count:
            yield f"layout: stages={shown} has {len(layout.stages)} entries, but there are {where}; give {count}"
        if sum(layout.stages) != spec.layers:
            yield (
                f"layout: stages={shown} holds {sum(layout.stages)} layers, but the model has {spec.layers}; "
                f"use counts that add up to {spec.layers}"
            )
    elif count > spec.layers:
        yield (
            f"layout: {where} are more than the {spec.layers} layers of the model; use at most {spec.layers} stages, "
            "or give stages= with empty ones"
        )
    if isinstance(layout.recompute, tuple) and len(layout.recompute) != count:
        yield (
            f"layout: recompute={','.join(layout.recompute)} has {len(layout.recompute)} entries, but there are "
            f"{where}; give one word, or {count}"
        )


def _batch_problems(job: Job) -> Iterator[str]:
    layout, size, sequence = job.layout, job.batch.global_size, job.data.sequence_length
    micro_batch = layout.micro_batch
    if micro_batch is None:
        yield "layout: micro_batch is not chosen yet; resolve the job first"
        return
    if micro_batch > size:
        yield f"layout: micro_batch={micro_batch} is above batch.global_size={size}; use 1 to {size}"
        return
    if micro_batch * sequence % layout.tp:
        need = layout.tp // math.gcd(sequence, layout.tp)
        yield (
            f"layout: tp={layout.tp} does not divide the {micro_batch * sequence} tokens of a micro-batch "
            f"(micro_batch={micro_batch} x data.sequence_length={sequence}); use a micro_batch that {need} divides"
        )
    wrong = [*split_problems(job)]
    yield from wrong
    split = None if wrong else first_split(job)
    steps = micro_steps(size, micro_batch, layout.dp) if split is None else split.micro_steps
    problem = micro_batch_rule(layout.schedule, layout.pp, layout.virtual_stages, steps)
    if problem:
        yield (
            f"layout: {problem}; batch.global_size={size}, dp={layout.dp} ({job.source('layout.dp')}) and "
            f"micro_batch={micro_batch} ({job.source('layout.micro_batch')}) give {steps}"
        )


def _sharding_problems(job: Job) -> Iterator[str]:
    layout = job.layout
    if layout.shard is not None:
        if layout.dp % layout.shard:
            yield f"layout: shard={layout.shard} does not divide dp={layout.dp}; use {either(_divisors(layout.dp))}"
        if layout.shard < layout.dp and layout.zero == 0 and not apart(job):
            yield (
                f"layout: shard={layout.shard} below dp={layout.dp} needs sharded state, but zero=0; "
                f"use zero=1, 2 or 3, or shard={layout.dp}"
            )
    if layout.zero == 3 and layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        yield (
            f"layout: zero=3 with schedule={layout.schedule} would lose gradients, because parameters are freed "
            f"between its two halves of backward; use zero=0, 1 or 2, or schedule={_FULL_BACKWARD}"
        )


def _mode_problems(job: Job) -> Iterator[str]:
    layout, train = job.layout, job.train
    if train.deterministic and layout.zero >= 2:
        if layout.shard_degree < layout.dp:
            yield (
                f"train.deterministic: true has no fixed order of sums for zero={layout.zero} with "
                f"shard={layout.shard_degree} below dp={layout.dp}; use zero=0 or 1, or shard={layout.dp}"
            )
        if layout.pp > 1:
            yield (
                f"train.deterministic: true is not available yet for zero={layout.zero} with pp={layout.pp}; "
                "use zero=0 or 1, or pp=1"
            )
    if train.compile and layout.tp > 1:
        yield f"train.compile: true is not available with tp={layout.tp}; use tp=1, or compile=false"
    if train.compile and layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES:
        yield (
            f"train.compile: true does not work with schedule={layout.schedule}, which splits backward; "
            f"use {_FULL_BACKWARD}, or compile=false"
        )


def _training_problems(job: Job) -> Iterator[str]:
    if not job.data.train:
        yield "data.train is missing; give the path of a corpus, or a list of them"
    if job.train.eval_every is not None and job.data.validation is None:
        yield (
            f"train.eval_every: {job.train.eval_every} needs a validation set, but data.validation is missing; "
            "give a fraction such as 0.1, or files"
        )
    yield from unused_problems(job)
