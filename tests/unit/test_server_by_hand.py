"""Servers and workers that somebody starts by hand, and the files in which they find the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.job.job import load_job
from meshwright.recovery.lock import RunLock
from meshwright.train.prepare import prepare_run
from meshwright.train.servers import process
from meshwright.train.servers.process import read_run, serve, work
from meshwright.train.servers.whereabouts import FACTS, TOKEN, write_token
from tests.command_line import write_job


def write_going(folder: Path) -> None:
    """A run directory as a launcher leaves it that was killed."""
    job = load_job(write_job(folder), ["sync.strategy=server", "sync.servers=2"]).resolve()
    (folder / "job.toml").write_text(job.to_toml())
    write_token(folder)
    (folder / FACTS).write_text(json.dumps({"coordinator": ["127.0.0.1", 9], "version": 0}))


def test_what_a_process_started_by_hand_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_going(tmp_path)
    for role, words, sentence in (
        (work, (tmp_path, -1, "me"), "--worker: -1 is no worker's index; use 0 to 1, or more to join them"),
        (serve, (tmp_path, -1, "me"), "--server: there is no shard -1 in this run; use 0 to 1"),
        (serve, (tmp_path, 2, "me"), "--server: there is no shard 2 in this run; use 0 to 1"),
    ):
        with pytest.raises(InputError) as refused:
            role(*words)
        assert str(refused.value) == sentence
    for name in ("a b", "", "coordinator", "x/beat", "n" * 101):
        monkeypatch.setattr(process, "run_as_rank", lambda begin: begin())
        with pytest.raises(InputError, match="cannot be a process's name; use 1 to 100 letters") as refused:
            process.main([str(tmp_path), "--worker", "0", "--name", name])
        assert str(refused.value).startswith(f'--name: "{name}" ') and refused.value.exit_code == 2


def test_a_directory_without_a_run_that_is_going_says_what_it_lacks(tmp_path: Path) -> None:
    write_going(tmp_path)
    for text, why in (
        ("{", "its servers.json is not as a launcher writes it"),
        ("{}", "its servers.json is not as a launcher writes it"),
        (None, "it has no servers.json"),
    ):
        if text is None:
            (tmp_path / FACTS).unlink()
        else:
            (tmp_path / FACTS).write_text(text)
        with pytest.raises(InputError, match=rf"holds no parameter-server run that is going \({why}\); give the dir"):
            read_run(tmp_path)
    with pytest.raises(InputError, match=r"\(there is no such directory\)"):
        read_run(tmp_path / "nowhere")


def test_what_a_killed_launcher_left_goes_with_the_next_run_but_not_while_one_is_going(tmp_path: Path) -> None:
    write_going(tmp_path)
    job = load_job(tmp_path / "job.toml", ["sync.strategy=all-reduce", "sync.servers=1"]).resolve()
    with RunLock(tmp_path), pytest.raises(InputError, match="is in use by"):
        prepare_run(job, tmp_path, resume=True)
    assert (tmp_path / FACTS).exists() and (tmp_path / TOKEN).exists()
    with pytest.raises(InputError, match="has no complete checkpoint"):
        prepare_run(job, tmp_path, resume=True)
    assert not (tmp_path / FACTS).exists() and not (tmp_path / TOKEN).exists()
