"""The rules between fields: each refusal has the value, the rule and the legal values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.job.job import Job, job_from_values
from meshwright.job.layout import Layout, Schedule
from meshwright.job.layout_text import parse_layout
from meshwright.job.memory import check_memory, model_state_bytes, pipeline_rank_elements
from meshwright.job.model_spec import ModelSpec
from meshwright.job.presets import PRESETS, preset
from meshwright.job.schedule_rules import micro_batch_rule, micro_steps
from meshwright.job.validate import check_job
from tests.small_jobs import WIDE, unresolved_job


def refused(job: Job, ranks: int | None = None, **more: Any) -> list[str]:
    with pytest.raises(InputError) as error:
        job.resolve(ranks, **more)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("tp=3", "layout: tp=3 does not divide 8 key/value heads; use 1, 2, 4 or 8"),
        ("cp=2", "layout: cp=2 (context parallel) is not available yet; use 1"),
        ("ep=2", "layout: ep=2 (expert parallel) is not available yet; use 1"),
        ("virtual=2", "layout: virtual=2 needs a pipeline, but pp=1; use virtual=1, or pp of at least 2"),
        ("schedule=zbv", "layout: schedule=zbv needs a pipeline, but pp=1; "
         "leave schedule out, or use pp of at least 2"),
        ("pp=2 schedule=zbv virtual=3", "layout: virtual=3 does not fit schedule=zbv, which folds two stages a rank; "
         "use 2"),
        ("pp=2 virtual=2", "layout: virtual=2 does not fit schedule=1f1b, which has one stage a rank; use 1, or a "
         "schedule of dualpipev, interleaved, looped-bfs, zbv, zero-bubble"),
        ("pp=16", "layout: pp=16 x virtual=1 = 16 stages are more than the 8 layers of the model; use at most 8 "
         "stages, or give stages= with empty ones"),
        ("pp=2 stages=3,3", "layout: stages=3,3 holds 6 layers, but the model has 8; use counts that add up to 8"),
        ("pp=2 stages=3,3,2", "layout: stages=3,3,2 has 3 entries, but there are pp=2 x virtual=1 = 2 stages; give 2"),
        ("pp=2 recompute=full,none,full", "layout: recompute=full,none,full has 3 entries, but there are pp=2 x "
         "virtual=1 = 2 stages; give one word, or 2"),
        ("dp=2 placement=1,2", "layout: placement=1,2 does not name each rank once; use some order of 0 to 1"),
        ("dp=2 placement=0,0", "layout: placement=0,0 does not name each rank once; use some order of 0 to 1"),
        ("dp=4 shard=3 zero=1", "layout: shard=3 does not divide dp=4; use 1, 2 or 4"),
        ("dp=4 shard=2", "layout: shard=2 below dp=4 needs sharded state, but zero=0; use zero=1, 2 or 3, or shard=4"),
        ("micro_batch=16", "layout: micro_batch=16 is above batch.global_size=8; use 1 to 8"),
        ("dp=2 pp=2 zero=3 schedule=zbv", "layout: zero=3 with schedule=zbv would lose gradients, because parameters "
         "are freed between its two halves of backward; use zero=0, 1 or 2, or schedule=gpipe, 1f1b, interleaved or "
         "looped-bfs"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_the_job(layout: str, sentence: str) -> None:
    assert refused(unresolved_job(layout)) == [sentence]


@pytest.mark.parametrize(
    "layout",
    [
        "", "dp=2 zero=3", "dp=1 zero=3", "tp=8", "dp=3", "dp=4 shard=2 zero=2", "dp=4 shard=4", "pp=4 stages=8,0,0,0",
        "dp=2 pp=2 zero=3 schedule=interleaved", "dp=2 pp=2 zero=2 schedule=zero-bubble", "pp=2 schedule=gpipe",
        "pp=4 schedule=dualpipev", "pp=2 schedule=looped-bfs virtual=4", "dp=2 placement=1,0", "dp=16",
        "pp=2 recompute=full,none", "dp=2 tp=2 pp=2 zero=1",
    ],
)  # fmt: skip
def test_layouts_that_fit(layout: str) -> None:
    job = unresolved_job(layout).resolve()
    asked = parse_layout(layout)
    assert job.layout.model_copy(update={"micro_batch": None}) == asked
    assert job.layout.micro_batch is not None
    check_job(job)


def test_degrees_must_multiply_to_the_ranks_and_say_where_they_came_from() -> None:
    job = unresolved_job().with_layout(parse_layout("dp=2 tp=2"), "--layout")
    assert refused(job, 8, ranks_from="WORLD_SIZE") == [
        "layout: dp=2 (--layout) x tp=2 (--layout) x pp=1 (default) is 4 ranks, but there are 8 ranks (WORLD_SIZE); "
        "use degrees whose product is 8, or 4 ranks"
    ]
    assert refused(unresolved_job("dp=2", cluster__ranks=1)) == [
        "layout: dp=2 (given) x tp=1 (default) x pp=1 (default) is 2 ranks, but there are 1 rank (given); "
        "use degrees whose product is 1, or 2 ranks"
    ]
    assert unresolved_job("zero=1").resolve(4).layout.dp == 4, "without degrees all ranks are data parallel"
    assert unresolved_job("zero=1").resolve(4).source("layout.dp") == "chosen"


def test_experts_can_be_planned_only() -> None:
    job = job_from_values(
        {"model": {"preset": "mixtral-8x7b"}, "data": {"sequence_length": 64}, "batch": {"global_size": 8}}
    )
    assert refused(job) == [
        "model: experts=8 can be planned but not trained yet; use a dense model (experts=0)",
        "data.train is missing; give the path of a corpus, or a list of them",
    ]
    job.resolve(purpose="plan")


@pytest.mark.parametrize(
    ("changes", "layout", "sentence"),
    [
        ({"data__sequence_length": 63, "data__train": "/x"}, "tp=2 micro_batch=1", "layout: tp=2 does not divide the "
         "63 tokens of a micro-batch (micro_batch=1 x data.sequence_length=63); use a micro_batch that 2 divides"),
        ({"model__positions": "learned", "model__max_positions": 32}, "", "data.sequence_length: 64 is above the 32 "
         "learned positions of the model (model.max_positions); use 1 to 32"),
        ({"train__deterministic": True}, "dp=4 shard=2 zero=2", "train.deterministic: true has no fixed order of sums "
         "for zero=2 with shard=2 below dp=4; use zero=0 or 1, or shard=4"),
        ({"train__deterministic": True}, "dp=2 pp=2 zero=3", "train.deterministic: true is not available yet for "
         "zero=3 with pp=2; use zero=0 or 1, or pp=1"),
        ({"train__compile": True}, "tp=2", "train.compile: true is not available with tp=2; use tp=1, or "
         "compile=false"),
        ({"train__compile": True}, "pp=2 schedule=zero-bubble", "train.compile: true does not work with "
         "schedule=zero-bubble, which splits backward; use gpipe, 1f1b, interleaved or looped-bfs, or compile=false"),
        ({"train__eval_every": 5}, "", "train.eval_every: 5 needs a validation set, but data.validation is missing; "
         "give a fraction such as 0.1, or files"),
        ({"optimizer__momentum": 0.9}, "", "optimizer.momentum: 0.9 is not used by adamw; use betas, or name=sgd"),
        ({"model__ffn_hidden": 90}, "tp=4", "layout: tp=4 does not divide model.ffn_hidden=90; use 1 or 2"),
        ({"cluster__memory_per_rank_bytes": 1000000}, "", "cluster.memory_per_rank_bytes: 1,000,000 bytes a rank, but "
         "parameters, gradients and optimizer state of each rank are 4,148,224 bytes under layout micro_batch=8, "
         "before activations; use more ranks (tp, pp), a higher zero with more dp, or a smaller model"),
    ],
)  # fmt: skip
def test_other_fields_that_do_not_fit(changes: dict[str, Any], layout: str, sentence: str) -> None:
    if "model" in {key.split("__")[0] for key in changes}:
        changes = {**{f"model__{key}": value for key, value in WIDE.items()}, **changes}
    assert refused(unresolved_job(layout, **changes)) == [sentence]


def test_several_faults_come_together() -> None:
    lines = refused(unresolved_job("dp=4 shard=3 zero=2 tp=3 cp=2", train__compile=True), 5)
    assert len(lines) == 5


def test_too_few_micro_batches_say_where_the_number_comes_from() -> None:
    (line,) = refused(unresolved_job("dp=4 pp=4 micro_batch=1"))
    assert "2 a step on each data-parallel rank, but schedule 1f1b with pp=4 needs at least 4" in line
    assert line.endswith("batch.global_size=8, dp=4 (given) and micro_batch=1 (given) give 2")
    (line,) = refused(unresolved_job("pp=2 schedule=interleaved micro_batch=1", batch__global_size=5))
    assert "use 4 or 6" in line and line.endswith("give 5")


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 3))
def test_every_layer_is_in_exactly_one_stage(layers: int, pp: int, virtual: int) -> None:
    for schedule in ("1f1b", "interleaved", "zbv"):
        layout = Layout(pp=pp, schedule=schedule, virtual=virtual if schedule == "interleaved" else None)
        stages = layout.stage_layers(layers)
        assert [layer for stage in stages for layer in stage] == list(range(layers))
        sizes = [len(stage) for stage in stages]
        assert max(sizes) - min(sizes) <= 1
        held = sorted(stage for rank in range(pp) for stage in layout.stages_of(rank))
        assert held == list(range(layout.stage_count))


def test_thirty_layers_on_four_stages() -> None:
    assert [len(stage) for stage in Layout(pp=4).stage_layers(30)] == [8, 8, 7, 7]


_SCHEDULES: list[Schedule] = ["gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev", "2bw"]


@given(
    size=st.integers(1, 40), sequence=st.integers(1, 12), dp=st.integers(1, 5), pp=st.integers(1, 4),
    schedule=st.sampled_from(_SCHEDULES), tp=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_the_chosen_micro_batch_is_legal_whenever_one_is(
    size: int, sequence: int, dp: int, pp: int, schedule: Schedule, tp: int
) -> None:
    layout = Layout(dp=dp, tp=tp, pp=pp, schedule=schedule if pp > 1 else "1f1b")
    job = unresolved_job(batch__global_size=size, data__sequence_length=sequence).with_layout(layout)

    def legal(number: int) -> bool:
        steps = micro_steps(size, number, dp)
        fits = micro_batch_rule(layout.schedule, pp, layout.virtual_stages, steps) is None
        return number * sequence % tp == 0 and fits

    share = -(-size // dp)
    if any(legal(number) for number in range(1, share + 1)):
        chosen = job.resolve().layout.micro_batch
        assert chosen is not None and legal(chosen)


@given(st.integers(1, 32), st.integers(1, 6))
def test_the_deterministic_micro_batch_does_not_depend_on_dp(size: int, dp: int) -> None:
    chosen = {
        unresolved_job(f"dp={degree} tp=4", batch__global_size=size, data__sequence_length=6, train__deterministic=True)
        .resolve()
        .layout.micro_batch
        for degree in (1, dp)
        if size >= 2
    }
    assert chosen <= {2}


def test_micro_steps_cover_uneven_batches() -> None:
    assert micro_steps(8, 1, 3) == 3
    assert micro_steps(7, 2, 2) == 2
    assert micro_steps(1, 4, 4) == 1


def test_model_state_bytes_by_hand() -> None:
    """4 ranks, float32: 16 bytes a parameter; ZeRO-1, 2, 3 divide 8, 12, 16 of them by dp."""
    spec = ModelSpec(**WIDE)
    count = spec.parameter_count
    assert model_state_bytes(unresolved_job()) == [16 * count]
    shard = -(-count // 4)
    assert model_state_bytes(unresolved_job("dp=4 zero=1")) == [8 * count + 8 * shard]
    assert model_state_bytes(unresolved_job("dp=4 zero=2")) == [4 * count + 12 * shard]
    assert model_state_bytes(unresolved_job("dp=4 zero=3")) == [16 * shard]
    half = unresolved_job("dp=4 zero=3", precision__dtype="bfloat16")
    assert model_state_bytes(half) == [(2 + 4 + 12) * shard]
    assert model_state_bytes(unresolved_job(optimizer__name="sgd")) == [8 * count]
    with pytest.raises(InputError, match=r"this machine: 10 bytes a rank, but .* are [0-9,]+ bytes under layout"):
        check_memory(unresolved_job(), 10, "this machine")


@pytest.mark.parametrize("name", [name for name in PRESETS if "mixtral" not in name])
def test_pipeline_and_tensor_ranks_hold_the_whole_model(name: str) -> None:
    spec = preset(name)
    ranks = pipeline_rank_elements(spec, Layout(pp=4))
    copies = spec.vocabulary * spec.hidden if spec.tied else 0
    assert sum(ranks) == spec.parameter_count + copies
    if spec.kv_heads % 2 == 0:
        split = pipeline_rank_elements(spec, Layout(tp=2))[0]
        assert spec.parameter_count / 2 < split < spec.parameter_count / 2 * 1.07
