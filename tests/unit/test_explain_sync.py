"""``plan --explain-sync``: an element followed from one worker to the sum of all, under every algorithm and layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.cli.plan_sync import explain_sync
from meshwright.errors import InputError
from meshwright.job.sync_section import UNCHUNKED
from meshwright.plan.place import Place
from meshwright.plan.state import buckets, division, groups
from meshwright.prove.sync_cases_algorithms import ALGORITHMS
from meshwright.sync.follow import follow
from meshwright.sync.schedule import Message, Round
from tests.command_line import write_job
from tests.small_jobs import small_job

LAYOUTS = ("dp=5", "dp=4 zero=1", "dp=3 tp=2 zero=2", "dp=4 shard=2 zero=3", "dp=4 pp=2 shard=2 zero=1")


def job_with(algorithm: str, layout: str) -> Any:
    sync: dict[str, Any] = {"algorithm": algorithm}
    if algorithm not in UNCHUNKED and ("zero" not in layout or "shard" in layout):  # else nothing is all-reduced
        sync["chunk_bytes"] = 900
    if algorithm in ("hierarchical", "leaders"):
        sync["node_size"] = 2
    return small_job(f"{layout} micro_batch=1", sync=sync, batch={"global_size": 12})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_contribution_is_in_the_sum_once(algorithm: str, layout: str) -> None:
    job = job_with(algorithm, layout)
    dp, tp = job.layout.dp, job.layout.tp
    sizes = set()
    for rank in range(job.layout.ranks):
        place = Place(job, rank)
        divided = division(job, place)
        units = groups(place, divided) if divided.grouped else buckets(job, place, divided)
        for element in (None, f"{list(place.tensors)[-1].name}[1]"):
            path = explain_sync(job, rank, element)
            mine = 1 << (rank // tp % dp)
            assert [path[0].value, path[1].value] == [mine, mine]
            assert path[1].bytes in {unit.size * place.wide_bytes for unit in units}
            result = next(one for one in path if one.what.startswith("the sum of"))
            assert result.value == (1 << dp) - 1
            assert f"the sum of {dp} of {dp} dp ranks" in result.what
            assert all(one.value & mine for one in path if one.where == "group")
            assert {one.weight for one in path} <= {"1/192", ""}
            sizes.add(len(path))
    assert max(sizes) > 3


def test_a_schedule_that_adds_twice_is_found() -> None:
    both = Message(1, ((0, 1),))
    wrong = [[Round((both,), adds=True), Round((both,), adds=True)], [Round(adds=True), Round(adds=True)]]
    with pytest.raises(ValueError, match=r"round 1: \[0\] would be added twice"):
        follow(wrong, 0, [frozenset({0}), frozenset({1})])


@pytest.mark.parametrize(
    ("rank", "element", "sentence"),
    [
        (9, None, "--rank: 9 is not a rank of layout dp=5 micro_batch=1; use 0 to 4"),
        (0, "head", "--element: 'head' is not of the form name[index], for example embedding.weight[0]"),
        (0, "heads.weight[0]", "--element: rank 0 has no parameter 'heads.weight'; it has embedding.weight,"),
        (0, "head.weight[99999]", "--element: head.weight has 3104 elements on rank 0, not 100000; use 0 to 3103"),
    ],
)
def test_what_is_not_there_is_refused(rank: int, element: str | None, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        explain_sync(job_with("ring", "dp=5"), rank, element)
    assert str(refused.value).startswith(sentence)


def test_codes_and_meetings_are_not_followed() -> None:
    coded = small_job("dp=2 micro_batch=1", sync={"compression": "bf16"}, model={"hidden": 128})
    with pytest.raises(InputError, match="bf16 sends no single gradient elements; follow them with"):
        explain_sync(coded, 0, None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_job(tmp_path))
    words = ["plan", file, "--layout", "dp=2 zero=1", "--explain-sync", "--rank", "1"]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [one["where"] for one in found["boundaries"]] == ["worker", "bucket", "group", "result", "result"]
    assert [one["value"] for one in found["boundaries"]] == [2, 2, 3, 3, 0]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--element", "layers.0.mlp.down.weight[7]"])
    assert "the sum of 2 of 2 dp ranks" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="2"):
        main(["plan", file, "--element", "head.weight[0]"])
    assert "--element: 'head.weight[0]' is followed by --explain-sync only" in capsys.readouterr().err
