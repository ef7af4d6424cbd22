"""Layouts against one device: the standard set, drawn ones, and planted errors that must be found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.job.job import Job, load_job
from meshwright.job.layout import SPLIT_BACKWARD_SCHEDULES
from meshwright.prove.check import Prover, case_request
from meshwright.prove.layout_run import Request
from meshwright.prove.matrix import SCHEDULES, Case, layout_cases, self_test_cases
from meshwright.prove.planted import PLANTS
from meshwright.prove.pool import RankPool
from tests.small_jobs import request, small_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.toml"
CASES = list(enumerate(layout_cases()))


@pytest.fixture(scope="module")
def job() -> Job:
    return load_job(EXAMPLE)


@pytest.fixture(scope="module")
def prover(ranks: Callable[[int], RankPool]) -> Prover:
    return Prover(ranks)


@pytest.mark.parametrize(("number", "case"), CASES, ids=[case.label for _, case in CASES])
def test_standard_layout_in_float64(prover: Prover, job: Job, number: int, case: Case) -> None:
    """Every case of the matrix, each with one of the optimizers."""
    optimizer = ("sgd", "adamw")[number % 2]
    result = prover.prove(case_request(job, case, "float64", optimizer, 2), case.label)  # type: ignore[arg-type]
    assert result.passed, result
    assert result.max_relative_parameter_difference < 1e-10


@pytest.mark.parametrize(("number", "case"), CASES[::5], ids=[case.label for _, case in CASES[::5]])
def test_standard_layout_in_float32(prover: Prover, job: Job, number: int, case: Case) -> None:
    optimizer = ("sgd", "adamw")[number % 2]
    result = prover.prove(case_request(job, case, "float32", optimizer, 2), case.label)  # type: ignore[arg-type]
    assert result.passed, result


@pytest.mark.all
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_whole_matrix(prover: Prover, job: Job, dtype: str, optimizer: str) -> None:
    for _, case in CASES:
        result = prover.prove(case_request(job, case, dtype, optimizer, 10), case.label)  # type: ignore[arg-type]
        assert result.passed, result


SELF_TEST = self_test_cases(4)
SAMPLE = {"dp=2 zero=1", "dp=2 zero=3", "tp=2", "pp=2 schedule=zbv micro_batch=1", "dp=2 tp=2"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.label, marks=() if c.label in SAMPLE else pytest.mark.all) for c in SELF_TEST]
)
def test_planted_errors_are_found(prover: Prover, job: Job, case: Case) -> None:
    request = case_request(job, case, "float64", "sgd", 2)
    clean = prover.prove(request, case.label)
    assert clean.passed, clean
    for kind in PLANTS:
        found = prover.self_test(request, case.label, kind)
        assert found.passed, found


@st.composite
def drawn_jobs(draw: st.DrawFn) -> Request:
    """A layout of at most 4 ranks and a model shape; what the rules refuse is drawn again."""
    dp, tp, pp = draw(st.sampled_from([(1, 1, 2), (2, 1, 1), (1, 2, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]))
    schedule = draw(st.sampled_from(SCHEDULES)) if pp > 1 else "1f1b"
    zero = draw(st.integers(0, 3))
    assume(not (zero == 3 and schedule in SPLIT_BACKWARD_SCHEDULES))
    shard = draw(st.sampled_from([dp, max(1, dp // 2)])) if zero else dp
    micro_batch = draw(st.integers(1, 2))
    recompute = draw(st.sampled_from(["none", "none", "selective", "full"]))
    gpt2 = draw(st.booleans())
    model = {
        "layers": draw(st.integers(4, 6)),
        "kv_heads": 4 if gpt2 else draw(st.sampled_from([2, 4])),
        "tied": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "ffn_hidden": draw(st.sampled_from([24, 48])),
        "vocabulary": draw(st.sampled_from([97, 64])),
        "sliding_window": draw(st.sampled_from([0, 5])),
        "qk_norm": draw(st.booleans()),
    }
    if gpt2:
        model |= {
            "positions": "learned", "norm": "layernorm", "activation": "gelu_tanh", "gated": False,
            "qkv_bias": True, "output_bias": True, "mlp_bias": True,
        }  # fmt: skip
    layout = f"dp={dp} tp={tp} pp={pp} zero={zero} micro_batch={micro_batch} recompute={recompute}"
    layout += f" schedule={schedule}" if pp > 1 else ""
    layout += f" shard={shard}" if shard != dp else ""
    try:
        job = small_job(
            layout,
            model=model,
            batch={"global_size": draw(st.sampled_from([8, 16, 13]))},
            optimizer={"clip_norm": draw(st.sampled_from([0.2, 100.0]))},
        )
    except InputError:
        assume(False)
    return request(job, 2, masked=draw(st.booleans()))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=drawn_jobs())
def test_drawn_layouts_equal_one_device(prover: Prover, drawn: Request) -> None:
    result = prover.prove(drawn, str(drawn.job.layout))
    assert result.passed, (result, drawn.job.model_spec)


@pytest.mark.all
@pytest.mark.timeout(3600)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=drawn_jobs())
def test_many_drawn_layouts_equal_one_device(prover: Prover, drawn: Request) -> None:
    result = prover.prove(drawn, str(drawn.job.layout))
    assert result.passed, (result, drawn.job.model_spec)
