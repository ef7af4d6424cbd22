"""The verbs are functions of the package, found without importing torch."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright import verbs
from meshwright.errors import InputError
from meshwright.job.cluster import load_cluster
from meshwright.job.job import job_from_values
from meshwright.plan.answer import Plan


def test_importing_meshwright_imports_nothing_heavy() -> None:
    code = (
        "import sys, meshwright\n"
        "assert all(map(callable, (meshwright.plan, meshwright.train, meshwright.check)))\n"
        "import meshwright.plan.space\n"
        "assert callable(meshwright.plan) and meshwright.plan.space\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["plan", "train", "check"])
def test_each_verb_is_the_function_of_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verb = getattr(verbs, name)
    assert inspect.getdoc(verb)
    assert inspect.signature(getattr(meshwright, name)) == inspect.signature(verb)
    if name != "check":
        monkeypatch.setattr(verbs, name, lambda job, **named: (job, named))
        assert getattr(meshwright, name)("job.toml", top=3) == ("job.toml", {"top": 3})


def test_what_is_no_verb_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'paln'"):
        _ = meshwright.paln  # codespell:ignore paln


AUTO: dict[str, Any] = {
    "model": {"preset": "gpt3-350m"},
    "data": {"sequence_length": 512},
    "batch": {"global_size": 8},
    "precision": {"dtype": "bfloat16"},
    "layout": "auto",
}


def test_auto_becomes_the_planned_layout_and_the_run_keeps_the_plan(tmp_path: Path) -> None:
    job = job_from_values({**AUTO, "cluster": {"machines": "1x4 A100-SXM4-80GB"}})
    planned = verbs.with_planned_layout(job)
    assert not planned.job.auto and planned.job.layout.ranks == 4
    assert planned.job.source("layout.dp") == "planned"
    planned.job.resolve(purpose="plan")
    assert planned.plan is not None and planned.measured is None
    assert planned.plan.layouts[0].layout == str(planned.job.layout)
    planned.write(tmp_path)
    assert Plan.model_validate_json((tmp_path / "plan.json").read_text()) == planned.plan
    assert not (tmp_path / "cluster.json").exists()
    assert verbs.with_planned_layout(job, ranks=2).job.layout.ranks == 2


def test_a_layout_that_is_given_is_not_planned() -> None:
    job = job_from_values({**AUTO, "layout": "dp=2"})
    assert verbs.with_planned_layout(job).job is job


def test_a_resumed_run_keeps_its_layout(tmp_path: Path) -> None:
    begun = job_from_values({**AUTO, "layout": "tp=2 pp=2 micro_batch=2"}).resolve(purpose="plan")
    (tmp_path / "job.toml").write_text(begun.to_toml())
    planned = verbs.with_planned_layout(job_from_values(AUTO), run=tmp_path)
    assert planned.job.layout == begun.layout and planned.plan is None


def test_a_job_without_machines_is_planned_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = load_cluster("1x2 V100-SXM2-32GB")
    monkeypatch.setattr(verbs, "_measured_machine", lambda job, say: measured)
    planned = verbs.with_planned_layout(job_from_values({**AUTO, "precision": {"dtype": "float16"}}))
    assert planned.job.layout.ranks == 2
    planned.write(tmp_path)
    assert load_cluster(str(tmp_path / "cluster.json")) == measured
    with pytest.raises(InputError, match="nothing says which machines"):
        verbs.with_planned_layout(job_from_values(AUTO), launched_by="torchrun")


def test_auto_that_fits_nowhere_says_what_is_lacking() -> None:
    job = job_from_values({**AUTO, "cluster": {"machines": "1x2 A100-SXM4-80GB", "memory_per_rank_bytes": 10**9}})
    with pytest.raises(InputError, match=r"auto finds none that fits; the closest is .* too many"):
        verbs.with_planned_layout(job)
