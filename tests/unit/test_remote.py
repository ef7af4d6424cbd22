"""Copies of checkpoints in a store without rename: there when their manifest is, and whole when they are there."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from simulated_ranks import ThreadWorld, on_ranks

from meshwright.checkpoint import remote
from meshwright.checkpoint.folder import steps
from meshwright.checkpoint.load import read_tensor
from meshwright.checkpoint.placed import PlacedTensor
from meshwright.checkpoint.remote import Store, copy_to_store
from meshwright.checkpoint.save import save
from meshwright.checkpoint.verify import verify
from meshwright.cli.main import main
from meshwright.errors import CheckpointError, InputError, SaveError
from meshwright.job.job import load_job
from tests.command_line import write_job


@pytest.fixture
def url() -> Iterator[str]:
    """A store of its own, in memory."""
    name = uuid.uuid4().hex
    yield f"memory://{name}/run"
    store = fsspec.filesystem("memory")
    if store.exists(f"/{name}"):
        store.rm(f"/{name}", recursive=True)


def store_step(folder: Path, step: int, url: str, keep: int = 2, size: int = 2) -> Path:
    """Save and copy."""

    def run(world: ThreadWorld) -> Path:
        rows = 64 // size
        part = torch.full((rows, 8), float(step))
        box = PlacedTensor("w", (64, 8), (rows * world.rank, 0), (rows, 8), part)
        path = save(folder, step, [box], world=world)
        copy_to_store(path, url, world, keep=keep, job=folder.parent / "job.toml")
        return path

    return on_ranks(size, run)[0]


def test_copied_rotated_and_fetched(tmp_path: Path, url: str) -> None:
    (tmp_path / "job.toml").write_text("a job")
    for step in (900, 1000, 1100):
        store_step(tmp_path / "checkpoints", step, url)
    assert Store(url).steps() == [1000, 1100]
    for step, found in ((None, 1100), (1000, 1000)):
        path = Store(url).fetch(tmp_path / f"other-{found}", step)
        assert path == tmp_path / f"other-{found}/checkpoints/step-{found}" and verify(path).step == found
        assert torch.equal(read_tensor(path, "w"), torch.full((64, 8), float(found)))
        assert (tmp_path / f"other-{found}/job.toml").read_text() == "a job"


class Dies(BaseException):
    """The process, in the middle of a copy."""


def dying_at(point: int, patch: pytest.MonkeyPatch) -> None:
    """From now on, operation number ``point`` of the store ends the process."""
    files = type(fsspec.filesystem("memory"))
    count = itertools.count()

    def instead_of(original: Any) -> Any:
        def dying(*words: Any, **named: Any) -> Any:
            if next(count) == point:
                raise Dies
            return original(*words, **named)

        return dying

    for name in ("put_file", "rm_file", "rm", "makedirs"):
        patch.setattr(files, name, instead_of(getattr(files, name)))


def test_death_at_every_operation(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was under way: a copy is whole or not there, and the one before it goes only then."""
    for point in itertools.count():
        folder, place = tmp_path / str(point) / "checkpoints", f"{url}/{point}"
        store_step(folder, 1, place, size=1)
        died = False
        with monkeypatch.context() as patch:
            dying_at(point, patch)
            try:
                store_step(folder, 2, place, keep=1, size=1)
            except Dies:
                died = True
        found = Store(place).steps()
        assert found in ([1], [1, 2], [2])
        for step in found:
            path = Store(place).fetch(tmp_path / f"from-{point}-{step}", step)
            assert torch.equal(read_tensor(path, "w"), torch.full((64, 8), float(step)))
        if not died:
            assert found == [2]
            break
    assert point > 4


def test_what_came_damaged_does_not_count(tmp_path: Path, url: str) -> None:
    store_step(tmp_path / "checkpoints", 3, url)
    files = fsspec.filesystem("memory")
    name = next(path for path in files.find(url.removeprefix("memory:/")) if "rank-00001" in path)
    data = bytearray(files.cat_file(name))
    data[-5] ^= 1
    files.pipe_file(name, bytes(data))
    with pytest.raises(CheckpointError, match="rank-00001"):
        Store(url).fetch(tmp_path / "other")
    assert steps(tmp_path / "other/checkpoints") == []
    with pytest.raises(CheckpointError, match="has no checkpoint of step 4; use one of 3"):
        Store(url).fetch(tmp_path / "other", 4)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        Store(url + "/nothing").fetch(tmp_path / "other")


def test_a_store_that_fails_is_said_on_all_ranks(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store_step(tmp_path / "checkpoints", 1, url)
    files = type(fsspec.filesystem("memory"))
    original = files.put_file

    def refuse(self: Any, source: str, target: str, **named: Any) -> Any:
        if "rank-00001" in target:
            raise OSError("the bucket is gone")
        return original(self, source, target, **named)

    monkeypatch.setattr(files, "put_file", refuse)
    with pytest.raises(SaveError, match=r"step-2 could not be copied to memory://.*the bucket is gone") as raised:
        store_step(tmp_path / "checkpoints", 2, url)
    assert "earlier copies are untouched" in str(raised.value)
    assert Store(url).steps() == [1] and steps(tmp_path / "checkpoints") == [1, 2]


def test_short_copies_are_seen(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(files, "size", lambda self, path: 7)
    with pytest.raises(SaveError, match="has 7 bytes after it was copied, instead of"):
        store_step(tmp_path / "checkpoints", 1, url)
    assert Store(url).steps() == []


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path)
    with pytest.raises(InputError, match='copy_to = "bucket/run" is no URL; give one such as s3://bucket/run'):
        load_job(job, ["checkpoint.copy_to=bucket/run"])
    with pytest.raises(InputError, match=r"nosuch://x/y is no URL of a store \(Protocol not known"):
        Store("nosuch://x/y")
    assert load_job(job, ["checkpoint.copy_to=memory://x/run"]).checkpoint.copy_to == "memory://x/run"
    monkeypatch.setattr("meshwright.job.sections.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs the package fsspec; pip install 'meshwright\[remote\]'") as raised:
        load_job(job, ["checkpoint.copy_to=memory://x/run"])
    assert "\n" not in str(raised.value)


def test_the_command(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store_step(tmp_path / "checkpoints", 5, url)
    for code, said in ((0, "step-5: all as written"), (2, "is there already; give another --out")):
        with pytest.raises(SystemExit) as left:
            main(["checkpoint", "fetch", url, "--out", str(tmp_path / "back")])
        output = capsys.readouterr()
        assert int(left.value.code or 0) == code and said in output.out + output.err
    assert remote.JOB == "job.toml"
