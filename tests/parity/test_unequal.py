"""Unequal batches on ranks: the update is the whole global batch's, and shares that follow the speed change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job, load_job
from meshwright.prove.check import Prover
from meshwright.prove.parity import gradient_difference, parameter_difference
from meshwright.prove.pool import RankPool
from meshwright.prove.sync_cases_unequal import UnequalCase, unequal_cases
from meshwright.train.loop import TrainingLoop
from tests.small_jobs import one_device, run, small_job

Ranks = Callable[[int], RankPool]
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


@pytest.mark.parametrize(
    ("layout", "split"),
    [
        ("dp=2 micro_batch=2", (1, 3)),
        ("dp=2 zero=3 micro_batch=3", (0, 1)),
        ("dp=4 shard=2 zero=3 micro_batch=2", (1, 2, 5, 0)),
        ("dp=4 shard=2 zero=1 micro_batch=4", (1, 2, 5, 0)),
        ("dp=2 tp=2 zero=2 micro_batch=4", (3, 1)),
        ("dp=2 pp=2 zero=1 micro_batch=2", (1, 3)),
    ],
)
def test_the_update_is_that_of_the_whole_batch(ranks: Ranks, layout: str, split: tuple[int, ...]) -> None:
    """With masks: the replicas differ in valid tokens even more than in sequences."""
    job = small_job(layout, batch={"split": split}, optimizer={"clip_norm": 0.5})
    found, expected = run(ranks, job), one_device(job)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert found.norms == pytest.approx(expected.norms, rel=1e-11)
    for step in range(3):
        assert gradient_difference(found.gradients[step], expected.gradients[step])[0] < 1e-10
    assert parameter_difference(found.parameters, expected.parameters, 0.15)[0] < 1e-10


@pytest.mark.all
@pytest.mark.parametrize("case", list(unequal_cases()), ids=lambda case: case.case.label)
def test_every_case_of_the_matrix(case: UnequalCase) -> None:
    with Prover() as prover:
        verdicts = list(case.prove(prover, load_job(QUICKSTART), "float64", 10))
    assert [verdict.worst for verdict in verdicts if not verdict.passed] == []


# -- shares that follow the speed -----------------------------------------------------------------------


def train_auto(job: Job, run_dir: str, slow: dict[int, int], resume: bool) -> tuple[int, ...]:
    """On a rank: a whole run in which rank r says that a row takes 1 + slow[r] seconds; the shares at its end."""
    with Mesh(job.layout) as mesh:
        loop = TrainingLoop(job, mesh, Path(run_dir), device=torch.device("cpu"), resume=resume, quiet=True)
        resizing = loop.resizing
        assert resizing is not None

        @contextmanager
        def around_step() -> Iterator[None]:
            yield
            split = resizing.sizer.split
            assert split == loop.loader.split
            rows = sum(split.rows(mesh.coordinate("dp")))
            resizing.own_seconds = rows * (1.0 + slow.get(mesh.rank, 0))

        resizing.around_step = around_step  # type: ignore[method-assign]
        loop.run()
        return resizing.sizer.split.sequences


def column(run_dir: Path, name: str) -> list[float]:
    """One figure of every step that the first rank recorded."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


@pytest.mark.parametrize("layout", ["dp=2 zero=3 micro_batch=4", "dp=2 tp=2 micro_batch=4"])
def test_a_run_follows_the_speed_and_resumes_with_its_shares(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    (tmp_path / "text.txt").write_text("\f".join(f"document {n} " + "abc def " * (n % 7) for n in range(200)))
    changes: dict[str, Any] = {
        "data": {"train": [str(tmp_path / "text.txt")], "cache": str(tmp_path), "document_mask": True},
        "train": {"steps": 10},
        "model": {"vocabulary": 260},
        "observe": {"one_device_steps": 0},
    }
    auto = small_job(layout, batch={"split": "auto"}, **changes)
    pool = ranks(auto.layout.ranks)
    for name in ("auto", "equal"):
        (tmp_path / name).mkdir()
    slow_ranks = dict.fromkeys(range(auto.layout.ranks // 2), 2)  # the first replica: a third of the speed
    assert set(pool.run(train_auto, auto, str(tmp_path / "auto"), slow_ranks, False)) == {(2, 6)}
    sequences = column(tmp_path / "auto", "sequences")
    assert sequences == [*[4] * sequences.count(4), *[2] * sequences.count(2)] and sequences.count(2) >= 2
    events = [json.loads(line) for line in (tmp_path / "auto" / "events.jsonl").read_text().splitlines()]
    resized = [event for event in events if event["event"] == "resized"]
    assert [(event["before"], event["sequences"]) for event in resized] == [([4, 4], [2, 6])]

    longer = {**changes, "train": {"steps": 12}}
    again = small_job(layout, batch={"split": "auto"}, **longer)
    pool.run(train_auto, again, str(tmp_path / "auto"), slow_ranks, True)
    assert column(tmp_path / "auto", "sequences")[10:] == [2, 2]
    equal = small_job(layout, **longer)
    pool.run(train_plain, equal, str(tmp_path / "equal"))
    assert column(tmp_path / "auto", "loss") == pytest.approx(column(tmp_path / "equal", "loss"), rel=1e-11)


def train_plain(job: Job, run_dir: str) -> None:
    """On a rank: a whole run."""
    with Mesh(job.layout) as mesh:
        TrainingLoop(job, mesh, Path(run_dir), device=torch.device("cpu"), resume=False, quiet=True).run()
