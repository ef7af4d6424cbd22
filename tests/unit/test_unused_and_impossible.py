"""What is set and would do nothing, and what can never come true, is refused like any wrong value."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.checkpoint.remote import Store
from meshwright.cli import train as train_verb
from meshwright.errors import InputError
from meshwright.job.job import load_job
from meshwright.observe.progress import _time
from meshwright.sync.server.sockets import listen
from tests.command_line import refused, settings, write_job

WIDE = ("model.vocabulary=512", "model.hidden=64")
"""Enough parameters to be worth compressing."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(train_verb, "launch", started)


@pytest.mark.parametrize(
    ("pairs", "begins"),
    [
        (["optimizer.min_lr_ratio=0.1"], "optimizer.min_lr_ratio: 0.1 is not used by optimizer.schedule=constant;"),
        (["optimizer.decay_steps=3"], "optimizer.decay_steps: 3 is not used by optimizer.schedule=constant;"),
        (["precision.loss_scale_initial=8.0"], "precision.loss_scale_initial: 8.0 is not used by precision.dtype="),
        (["checkpoint.mtbf_hours=3.0", "checkpoint.interval=9.0"], "checkpoint.mtbf_hours: 3.0 is used by"),
        (["data.prompt_field=question"], "data.prompt_field='question' is a field of JSONL, but '"),
        (["sync.chunk_bytes=3"], "sync.chunk_bytes: 3 must be a whole number of at least 256"),
        (["model.rope_scaling=[8.0,1.0,4.0,nan]"], "model: rope_scaling=[8.0, 1.0, 4.0, nan] must be four finite"),
        (["model.rope_scaling=[-8.0,1.0,4.0,8192]"], "model: rope_scaling=[-8.0, 1.0, 4.0, 8192.0] must be four"),
        (["model.rope_scaling=[8.0,4.0,1.0,8192]"], "model: rope_scaling=[8.0, 4.0, 1.0, 8192.0] must be four"),
        (["recovery.alert_webhook=alerts"], 'recovery.alert_webhook: "alerts" is no URL to post to; give one such as'),
        (["recovery.alert_webhook=ftp://host/x"], 'recovery.alert_webhook: "ftp://host/x" is no URL to post to;'),
        (["recovery.alert_command= "], 'recovery.alert_command: "" is no command; give one, or leave it out'),
        (["checkpoint.copy_to=file:///proc/nowhere"], "checkpoint.copy_to: file:///proc/nowhere cannot be written ("),
        (["recovery.digest_every=2", "sync.strategy=local", "sync.period=2"],
         "recovery.digest_every: 2 compares replicas that hold the same, but with sync.strategy=local they train"),
        (["recovery.memory_every=2", "sync.strategy=easgd", "sync.period=2"],
         "recovery.memory_every: 2 copies parameters and moments, but with sync.strategy=easgd each rank has more"),
        (["recovery.memory_every=2", "sync.compression=int8", *WIDE],
         "recovery.memory_every: 2 copies parameters and moments, but with sync.compression=int8 each rank has more"),
        (["recovery.outlier=9.0", "recovery.replay=true", "sync.compression=bf16", *WIDE],
         "recovery.outlier: 9 looks at each rank's own gradients as they are summed, which sync.compression=bf16 does "
         "not show; leave it and recovery.replay out, or use compression=none"),
        (["recovery.outlier=9.0", "sync.strategy=local", "sync.period=2"],
         "recovery.outlier: 9 looks at each rank's own gradients as they are summed, which sync.strategy=local does"),
        (["recovery.outlier=9.0", "train.deterministic=true"],
         "recovery.outlier: 9 looks at each rank's own gradients as they are summed, which train.deterministic=true"),
        (['fault.inject=["nan rank=0 step=2 micro_batch=7"]'],
         'fault.inject: "nan rank=0 step=2 phase=backward micro_batch=7": micro-batches of a rank and step: 1;'),
    ],
)  # fmt: skip
def test_jobs(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pairs: list[str], begins: str) -> None:
    assert refused(capsys, "train", job, "--out", tmp_path / "run", *settings(*pairs)).startswith(begins)
    assert not (tmp_path / "run" / "job.toml").exists()


def test_the_same_keys_where_they_are_used(job: Path) -> None:
    pairs = [
        "optimizer.schedule=cosine", "optimizer.min_lr_ratio=0.1", "optimizer.decay_steps=3",
        "precision.dtype=float16", "precision.loss_scale_initial=8.0", "checkpoint.interval=auto",
        "checkpoint.mtbf_hours=3.0", "model.rope_scaling=[8.0,1.0,4.0,8192.0]",
        "recovery.alert_webhook=http://127.0.0.1:9000/alerts", "recovery.alert_command=cat",
    ]  # fmt: skip
    load_job(job, pairs).resolve()


def test_an_empty_layout(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "train", job, "--out", tmp_path / "run", "--layout", " ").startswith('--layout: "" says')


def test_a_rendezvous_port_for_servers(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", job, "--out", tmp_path / "run", "--port", "18999", *settings("sync.strategy=server")]
    assert refused(capsys, *words) == (
        "--port: 18999 is where ranks meet, which sync.strategy=server has not; leave it out, or use "
        "--set sync.server_port=18999"
    )


def test_a_host_that_is_not_ours_is_not_blamed_on_the_port() -> None:
    with pytest.raises(InputError, match=r"^sync\.server_host: 203\.0\.113\.1 cannot be listened on \("):
        listen("203.0.113.1", None)


PLAN = ["plan", "--model", "gpt3-125m", "--cluster", "1x8 A100-SXM4-80GB", "--global-batch", "64", "--sequence", "512"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--compare", "dp=8", "--explain"], "--explain: not used by --compare; give one of them"),
        (["--compare", "dp=8", "--layout", "dp=8"], "--layout: not used by --compare; give one of them"),
        (["--compare", "dp=8", "--tokens", "1e9"], "--tokens: not used by --compare; give one of them"),
        (["--compare", "dp=8", "--explain-sync"], "--compare: not used by --explain-sync; give one of them"),
        (["--layout", "dp=8", "--rank", "3"],
         "--rank: 3 is of --explain or --explain-sync; give one of them, or leave --rank out"),
        (["--layout", "dp=8", "--confidence", "2"],
         "--confidence: without --mtbf nothing fails; give --mtbf, as 3.1h or 50700h/device"),
        (["--layout", "dp=8", "--elastic"],
         "--elastic: without --mtbf nothing fails; give --mtbf, as 3.1h or 50700h/device"),
        (["--layout", "dp=8", "--mtbf", "3h", "--checkpoint-cost", "30s", "--spares", "1"],
         "--spares: without --repair nothing comes back; give --repair, as 24h"),
    ],
)  # fmt: skip
def test_plans(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    assert refused(capsys, *PLAN, *words) == sentence


def test_what_is_no_time_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*_: object, **__: object) -> None:
        raise AssertionError("layouts were searched")

    monkeypatch.setattr("meshwright.cli.plan._find", searched)
    assert refused(capsys, *PLAN, "--mtbf", "3", "--checkpoint-cost", "30s").startswith("--mtbf: '3' is no time;")


def test_a_store_is_left_as_it_was(tmp_path: Path) -> None:
    Store(f"file://{tmp_path}/store").check()
    assert [path.name for path in tmp_path.rglob("*")] == ["store"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (195, "195 s"), (700, "12 min"), (12_000, "3 h 20 min"), (190_000, "2 d 4 h")],
)
def test_times_that_are_left(seconds: float, text: str) -> None:
    assert _time(seconds) == text
