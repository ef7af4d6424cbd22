"""What a schedule in which steps overlap does not go with, and that the search asks before it tries it."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.plan.arrays import SCHEDULES, Work
from meshwright.plan.legality import Modes
from meshwright.plan.planner import plan
from meshwright.plan.space import Counts, Space
from tests.small_jobs import unresolved_job


def make(layout: str, **changes: Any) -> Job:
    return unresolved_job(layout, **{"batch__global_size": 16, **changes})


@pytest.mark.parametrize(
    ("layout", "changes", "sentence"),
    [
        ("dp=2 zero=2", {}, "layout: zero=2 frees and gathers one set of parameters and gradients, but schedule=2bw "
         "keeps two versions of both; use zero=0 or 1, or schedule=1f1b"),
        ("", {"model__tied": True}, "layout: schedule=2bw does not go with model.tied=true, because adding up the "
         "embedding's two gradients would make the last stage wait for the first in every step; use tied=false, or "
         "schedule=1f1b"),
        ("", {"precision__dtype": "float16"}, "precision.dtype: float16 takes its loss scale from the step before, "
         "which has not ended when schedule=2bw begins the next; use bfloat16, or schedule=1f1b"),
        ("", {"train__compile": True}, "train.compile: true compiles each block for one set of parameters, but "
         "schedule=2bw keeps two; use compile=false, or schedule=1f1b"),
        ("dp=2", {"batch__split": [1, 1]}, "batch.split: shares of the batch may give steps unequal numbers of "
         "micro-batches, but schedule=2bw needs as many in every step; leave split out, or use schedule=1f1b"),
        ("", {"recovery__outlier": 5.0}, "recovery.outlier: 5 looks at a step before its update, but with "
         "schedule=2bw the next step has begun by then; leave it out, or use schedule=1f1b"),
        ("", {"recovery__digest_every": 5}, "recovery.digest_every: 5 compares or copies a state between steps, but "
         "with schedule=2bw ranks are at no one step; leave it out, or use schedule=1f1b"),
        ("", {"fault__inject": ["kill rank=0 step=2"]}, "fault: a fault is addressed by a step and a phase, but with "
         "schedule=2bw a rank is in two steps at once; leave [fault] out, or use schedule=1f1b"),
        ("", {"checkpoint__interval": 30.0}, "checkpoint.interval: 30.0 is due at a time that nobody knows when a step "
         "begins, which schedule=2bw has to, so as to drain the pipeline; use checkpoint.every, or schedule=1f1b"),
        ("dp=2", {"sync__strategy": "local"}, "sync.strategy: local changes parameters after a step, but with "
         "schedule=2bw the next step has begun by then; use strategy=all-reduce, or schedule=1f1b"),
        ("dp=2", {"sync__compression": "bf16"}, "sync.compression: bf16 keeps residuals from step to step in one "
         "buffer, but with schedule=2bw two steps sum in turn; use compression=none, or schedule=1f1b"),
    ],
)  # fmt: skip
def test_what_does_not_combine_is_refused_in_one_sentence(layout: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        make(f"pp=2 schedule=2bw micro_batch=1 {layout}", **changes).resolve()
    assert sentence in str(error.value).splitlines()


def test_it_needs_a_pipeline_and_as_many_micro_batches_as_ranks() -> None:
    with pytest.raises(InputError, match="schedule=2bw needs a pipeline, but pp=1; leave schedule out, or use"):
        make("schedule=2bw").resolve()
    with pytest.raises(InputError, match="1 a step on each data-parallel rank, but schedule 2bw with pp=2 needs"):
        make("pp=2 schedule=2bw micro_batch=16").resolve()
    with pytest.raises(InputError, match="virtual=2 does not fit schedule=2bw, which has one stage a rank; use 1"):
        make("pp=2 schedule=2bw virtual=2").resolve()


@pytest.mark.parametrize("layout", ["dp=2 zero=1", "tp=2", "recompute=full", "stages=5,3"])
def test_what_does_combine_is_allowed(layout: str) -> None:
    assert make(f"pp=2 schedule=2bw micro_batch=1 {layout}", train__deterministic=True).resolve().layout.delayed


def test_the_search_tries_it_only_where_it_is_asked_for() -> None:
    cluster, work, counts = "1x4 A100-SXM4-80GB", Work.of(make("auto")), Counts()
    plain, late = (Space(work, 4, 4, Modes(delayed=delayed)) for delayed in (False, True))
    before, after = (
        {SCHEDULES[one] for degrees in space.families() for a in space.chunks(degrees, counts) for one in a.schedule}
        for space in (plain, late)
    )
    assert after - before == {"2bw"}
    assert plan(make("auto"), cluster, top=1, delayed=True).searched == late.size().legal > plain.size().legal
    with pytest.raises(InputError, match=r"schedule=2bw does not go with model\.tied=true"):
        plan(make("auto", model__tied=True), cluster, delayed=True)
