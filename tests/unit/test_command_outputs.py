"""Where commands write: never over what is not theirs, and refused before the work that it would lose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.placed import whole
from meshwright.checkpoint.remote import Store
from meshwright.checkpoint.save import save
from meshwright.cli import calibrate_machine as calibrating
from meshwright.cli.main import main
from meshwright.errors import InputError
from meshwright.files import folder_problem
from tests.command_line import refused, write_job

NOWHERE = Path("/proc/meshwright")
"""What nobody can make, whoever runs the tests."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_job(folder)
    return folder


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("the machine was measured")

    monkeypatch.setattr(calibrating, "calibrate", measured)


def test_a_report_does_not_take_the_place_of_what_a_run_wrote(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "job.toml").read_bytes()
    assert refused(capsys, "report", run, "--out", run / "job.toml") == (
        f"--out: {run / 'job.toml'} must end in .html, as a report does; give for example job.html"
    )
    assert (run / "job.toml").read_bytes() == before


def test_a_report_does_not_take_the_place_of_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.html"
    plan.write_text('{"layouts": [{"fits": true}], "searched": 1}')
    before = plan.read_bytes()
    refused(capsys, "report", plan)
    assert plan.read_bytes() == before


def test_a_cluster_file_takes_the_place_of_a_cluster_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "ledger.json"
    ledger.write_text("{}")
    assert refused(capsys, "calibrate", "--out", ledger) == (
        f"--out: {ledger} is there and is not a cluster file, so it is not replaced; give another file"
    )
    assert ledger.read_text() == "{}"
    ledger.write_text('{"nodes": 1, "devices_per_node": 8, "device": "A100-SXM4-80GB"}')
    with pytest.raises(AssertionError, match="measured"):
        main(["calibrate", "--out", str(ledger), "--ranks", "1"])


def test_what_cannot_be_written_is_refused_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(run / "checkpoints", 1, [whole("w", torch.ones(2))], model={"name": "small"})
    (run / "file").touch()
    for words in (
        ["calibrate", "--out", "/proc/new.json"],
        ["report", run, "--out", "/proc/new.html"],
        ["checkpoint", "export", path, "--out", NOWHERE],
        ["checkpoint", "import", path, "--job", run / "job.toml", "--out", NOWHERE],
        ["checkpoint", "fetch", run.as_uri() + "/checkpoints", "--out", run / "file"],
    ):
        assert " cannot be written (" in refused(capsys, *words)


def test_asking_whether_a_folder_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    assert folder_problem(tmp_path / "a" / "b") is None
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    assert folder_problem(tmp_path / "file" / "b") == "Not a directory"


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("s3://bucket/run", "s3://bucket/run needs the package s3fs; pip install s3fs"),
        ("sftp://host/run", "sftp://host/run needs a package (install paramiko); use s3://, gs:// or az://"),
    ],
)
def test_a_store_without_its_package(monkeypatch: pytest.MonkeyPatch, url: str, sentence: str) -> None:
    def missing(_: str) -> None:
        raise ImportError("install paramiko")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        Store(url)
