"""`meshwright plan --compare-sync` as a user types it: every way once, fastest first, the others with their reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.job.job import load_job
from meshwright.job.sync_keys import MOMENTUM_ONLY
from meshwright.plan.planner import plan_layout
from meshwright.plan.sync_compare import compare_sync
from tests.slow_cluster import slow_cluster
from tests.unit.test_plan_cli import EIGHT, MODEL, plan

__all__ = ["plan"]

JOB = "examples/quickstart.toml"


@pytest.fixture
def machines(tmp_path: Path) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(slow_cluster(2, 2).model_dump_json())
    return str(path)


def test_every_way_stands_once_fastest_first_with_what_it_costs(plan: Any, machines: str) -> None:
    code, out, _ = plan(JOB, "--layout", "dp=4", "--cluster", machines, "--compare-sync", "--json")
    found = json.loads(out)
    rows = {one["way"]: one for one in found["ways"]}
    assert code == 0 and len(rows) == len(found["ways"])
    assert [one["step_time_s"] for one in found["ways"]] == sorted(one["step_time_s"] for one in found["ways"])
    refused = {one["way"]: one["reason"] for one in found["refused"]}
    assert set(MOMENTUM_ONLY) <= set(refused), "the job clips"
    assert all("clip_norm" in refused[kind] and "\n" not in refused[kind] for kind in MOMENTUM_ONLY)
    assert not set(refused) & set(rows)
    assert {"fp16", "bf16", "int8", "fp8", "sign", "qsgd", "powersgd rank 4", "dgc"} <= set(rows)
    others = ("all-reduce, direct", "all-reduce, hierarchical", "local", "easgd", "diloco, ", "diloco int8", "server")
    for start in others:
        assert sum(way.startswith(start) for way in rows) == 1, start
    assert "period 16 (default)" in next(way for way in rows if way.startswith("easgd"))
    assert found["link"] == "between nodes"
    direct, two_level = rows["all-reduce, direct"], rows["all-reduce, hierarchical"]
    assert direct["is_jobs"] and [one["is_jobs"] for one in found["ways"]].count(True) == 1
    assert direct["link_bytes"] == pytest.approx(2 * two_level["link_bytes"])
    same = {way for way, one in rows.items() if one["same_update"]}
    assert same == {way for way in rows if way.startswith(("all-reduce", "server"))}
    assert direct["memory_added_bytes"] == 0 < rows["int8"]["memory_added_bytes"]
    assert rows["server, synchronous"]["memory_added_bytes"] == -2 * 4 * 9_965_824, "its workers keep no moments"


def test_a_ways_settings_give_its_step_time(machines: str) -> None:
    job = load_job(JOB, [], "dp=4")
    for one in compare_sync(job, machines).ways:
        alone = load_job(JOB, list(one.settings), "dp=4")
        assert plan_layout(alone, machines).layouts[0].step_time_s == pytest.approx(one.step_time_s), one.way


def test_what_the_job_says_of_a_way_is_kept(machines: str) -> None:
    settings = ["sync.strategy=diloco", "sync.period=40", "sync.fragments=4", "sync.overlap=2"]
    found = compare_sync(load_job(JOB, settings, "dp=4"), machines)
    mine = next(one for one in found.ways if one.is_jobs)
    assert mine.way == "diloco, period 40" and "sync.overlap=2" in mine.settings
    assert {one.way for one in found.ways} >= {"local, period 40", "easgd, period 40"}
    own = compare_sync(load_job(JOB, ["sync.compression=int8", "sync.compression_block=64"], "dp=4"), machines)
    assert next(one for one in own.ways if one.is_jobs).way == "int8"


def test_on_measured_hosts_the_jobs_own_is_the_algorithm_that_training_takes() -> None:
    found = compare_sync(load_job(JOB, [], "dp=4"), slow_cluster(2, 2, host=True))
    assert next(one for one in found.ways if one.is_jobs).way == "all-reduce, hierarchical"


def test_a_way_of_the_jobs_own_stands_beside_the_others(machines: str) -> None:
    found = compare_sync(load_job(JOB, ["sync.algorithm=tree"], "dp=4"), machines)
    assert next(one for one in found.ways if one.is_jobs).way == "the job's own (all-reduce, tree)"
    assert "tree" in found.slower_algorithms


def test_tables_name_what_people_look_for(plan: Any, machines: str) -> None:
    code, out, _ = plan(JOB, "--layout", "dp=4", "--cluster", machines, "--compare-sync")
    assert code == 0
    for words in (
        "dp=4 micro_batch=2 on 2x2 core", "fastest first", "between nodes", "same update", "other algorithm",
        "all-reduce, direct *", "* the job's own", "not with this job and layout:", "Losses are not predicted",
        "not quicker than the direct exchange here: tree, halving-doubling",
    ):  # fmt: skip
        assert words in out, words


def test_on_accelerators_nccl_sums_and_what_needs_cpu_says_so(plan: Any) -> None:
    code, out, _ = plan(*MODEL, *EIGHT, "--layout", "dp=8", "--compare-sync", "--json")
    found = json.loads(out)
    assert code == 0 and found["link"] == "inside a node"
    assert [one["way"] for one in found["ways"] if one["way"].startswith("all-reduce")] == ["all-reduce"]
    (reason,) = [one["reason"] for one in found["refused"] if one["way"] == "server, synchronous"]
    assert reason == "cluster.device: cuda is not available with sync.strategy=server; use cpu"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*MODEL, *EIGHT, "--layout", "dp=1", "--compare-sync"], "layout: dp=1 has nothing to synchronise"),
        ([*MODEL, *EIGHT, "--layout", "auto", "--compare-sync"], "--compare-sync: ways to synchronise are compared"),
        ([*MODEL, *EIGHT, "--layout", "dp=2 tp=3", "--compare-sync"], "layout: tp=3 does not divide"),
        ([*MODEL, *EIGHT, "--layout", "dp=8", "--compare-sync", "--compare", "dp=4"], "--compare: not used by"),
        ([*MODEL, *EIGHT, "--layout", "dp=8", "--compare-sync", "--explain-sync"], "--compare-sync: not used by"),
        ([*MODEL, *EIGHT, "--layout", "dp=8", "--compare-sync", "--explain"], "--explain: not used by --compare-sync"),
        ([*MODEL, *EIGHT, "--layout", "dp=8", "--compare-sync", "--tokens", "1e9"], "--tokens: not used by"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(plan: Any, words: list[str], sentence: str) -> None:
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert err.startswith(sentence) and err.count("\n") == 1, err
