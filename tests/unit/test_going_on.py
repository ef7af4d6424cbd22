"""Going on with a run: what does not fit is refused before its job is replaced, and nothing of it is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright.cli.train as train_verb
from meshwright.checkpoint.placed import whole
from meshwright.checkpoint.save import save
from meshwright.cli.main import main
from meshwright.errors import InputError
from meshwright.job.job import load_job
from meshwright.recovery.threads import threads
from tests.command_line import refused, settings, write_job


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(train_verb, "launch", started)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def start(*words: object) -> None:
    with pytest.raises(AssertionError, match="ranks were started"):
        main(["train", *map(str, words)])


def checkpoint(run: Path, step: int, **header: Any) -> Path:
    header = {"optimizer": {"name": "adamw"}, "state": {"seed": 3, "samples": None}, **header}
    return save(run / "checkpoints", step, [whole("w", torch.ones(2))], model={"name": "small"}, **header)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


@pytest.fixture
def run(job: Path, tmp_path: Path) -> Path:
    start(job, "--out", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("pairs", "what"),
    [(["train.seed=7"], "train.seed is 7 in this job but 3"),
     (["data.sequence_length=16"], "the number of training samples is ")],
)  # fmt: skip
def test_other_samples_leave_the_run_as_it_was(
    job: Path, run: Path, capsys: pytest.CaptureFixture[str], pairs: list[str], what: str
) -> None:
    checkpoint(run, 2, state={"seed": 3, "samples": 100_000 if "data" in pairs[0] else None})
    before = (run / "job.toml").read_bytes()
    assert what in refused(capsys, "train", job, "--out", run, "--resume", *settings(*pairs))
    assert (run / "job.toml").read_bytes() == before


def rewrite(manifest: Path, **changes: object) -> None:
    content = {**json.loads(manifest.read_text()), **changes}
    manifest.write_text(json.dumps(content, sort_keys=True, separators=(",", ":")))


def test_a_newest_checkpoint_of_a_later_format_is_not_passed_over(
    job: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = checkpoint(run, 4) / "manifest.json"
    rewrite(later, version=9)
    said = (
        f"checkpoint: {later} has format version 9, but this meshwright reads versions 1 and 2; use a newer meshwright"
    )
    assert refused(capsys, "train", job, "--out", run, "--resume") == f"--resume: {said}"
    checkpoint(run, 2)
    assert refused(capsys, "train", job, "--out", run, "--resume") == (
        f"--resume: {said}; --from-step 2 goes on from the one before"
    )
    start(job, "--out", run, "--resume", "--from-step", "2")


def test_why_there_is_no_checkpoint_to_go_on_from(job: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint(run, 4) / "manifest.json").unlink()
    assert "has no complete checkpoint (checkpoint: " in refused(capsys, "train", job, "--out", run, "--resume")
    assert "step 4; start again" in refused(capsys, "train", job, "--out", run, "--resume", "--from-step", "4")


@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [("none", 2, "is not a folder; give a Hugging Face folder, or a step-N folder of a run"),
     ("empty", 2, "neither model.safetensors nor model.safetensors.index.json is there"),
     ("half", 1, "so it was copied or written only in part"),
     ("other", 2, " lacks: parameter/")],
)  # fmt: skip
def test_weights_to_begin_from_are_looked_at_before_ranks_start(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, code: int, says: str
) -> None:
    folder = tmp_path / kind
    if kind == "empty":
        folder.mkdir()
    elif kind != "none":
        folder = checkpoint(folder, 4)
    if kind == "half":
        (folder / "manifest.json").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["train", str(job), "--out", str(tmp_path / "run"), *settings(f"model.init_from={folder}")])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (code, "")
    assert str(folder) in said.err and says in said.err
    assert not (tmp_path / "run" / "job.toml").exists()


def test_a_checkpoint_brings_its_shape(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    shape = load_job(job).model_spec
    path = save(tmp_path, 2, [whole("w", torch.ones(2))], model=shape.model_dump(mode="json"))
    text = job.read_text()
    job.write_text(f'[model]\ninit_from = "step-2"\n\n{text[text.index("[data]"):]}')
    assert load_job(job).model_spec == shape
    rewrite(path / "manifest.json", model={})
    with pytest.raises(InputError, match=r"^model\.init_from: \S+manifest\.json says no shape of a model"):
        load_job(job)


def test_a_run_goes_on_without_the_weights_it_began_from(job: Path) -> None:
    began = load_job(job, ["model.init_from=weights"]).resolve()
    assert began.with_fresh_weights() == load_job(job).resolve()


def test_a_run_names_its_job_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "job.toml"
    path.write_text(path.read_text() + "\n[future]\nx = 1\n")
    for words in (["fault", str(run)], ["checkpoint", "prune", str(run)], ["report", str(run)]):
        if words[0] == "checkpoint":
            checkpoint(run, 2)
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(words)
        assert capsys.readouterr().err.startswith(f"{path}: future is not a section of a job; ")


@pytest.mark.parametrize(("text", "count"), [(None, 5), ("", 5), ("3", 3), ("4,2", 4)])
def test_threads(monkeypatch: pytest.MonkeyPatch, text: str | None, count: int) -> None:
    if text is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert threads(5) == count


def test_threads_that_are_none(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert refused(capsys, "train", job, "--out", tmp_path / "run") == (
        "OMP_NUM_THREADS=many is no number of threads; use a whole number of at least 1, or unset it for 1"
    )
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    with pytest.raises(InputError, match="OMP_NUM_THREADS=0"):
        threads()
