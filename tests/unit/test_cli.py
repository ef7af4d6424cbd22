"""The command line on wrong input: exit code 2, one sentence a fault, nothing started, nothing overwritten."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import meshwright.cli.check_proofs as check_proofs
import meshwright.cli.train as train_verb
import meshwright.train.prepare as prepare
from meshwright.cli.main import main
from meshwright.verbs import Planned
from tests.command_line import settings, write_job

Refuse = Callable[..., list[str]]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(train_verb, "launch", started)
    for name in ("check_layout", "check_matrix", "check_self_test"):
        monkeypatch.setattr(check_proofs, name, started)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command that must end with exit code 2; the lines it said, and nothing on standard output."""

    def run(*words: object) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        said = capsys.readouterr()
        assert ended.value.code == 2, said.err
        assert said.out == ""
        return said.err.splitlines()

    return run


def layout(text: str) -> list[str]:
    return ["--layout", text]


PIPELINE_TOO_SHORT = (
    "layout: micro-batches: 1 a step on each data-parallel rank, but schedule 1f1b with pp=2 needs at least 2; use 2 "
    "or more (a larger global batch, a smaller micro-batch or fewer data-parallel ranks); batch.global_size=4, dp=1 "
    "(default) and micro_batch=4 (--layout) give 1"
)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (settings("cluster.ranks=3"),
         "layout: dp=2 (job.toml) x tp=1 (default) x pp=1 (default) is 2 ranks, but there are 3 ranks (--set); use "
         "degrees whose product is 3, or 2 ranks"),
        (settings("model.heads=3"),
         "model: hidden=32 is not a multiple of heads=3; give head_size or change one"),
        (settings("model.kv_heads=3"), "model: kv_heads=3 does not divide heads=4; use 1, 2 or 4"),
        (layout("tp=4"), "layout: tp=4 does not divide 2 key/value heads; use 1 or 2"),
        (layout("pp=3"),
         "layout: pp=3 x virtual=1 = 3 stages are more than the 2 layers of the model; use at most 2 stages, or give "
         "stages= with empty ones"),
        (layout("pp=2 micro_batch=4"), PIPELINE_TOO_SHORT),
        ([*layout("tp=2 micro_batch=1"), *settings("data.sequence_length=31")],
         "layout: tp=2 does not divide the 31 tokens of a micro-batch (micro_batch=1 x data.sequence_length=31); use a "
         "micro_batch that 2 divides"),
        (layout("micro_batch=5"), "layout: micro_batch=5 is above batch.global_size=4; use 1 to 4"),
        (settings("model.hidden=0"), "model.hidden: 0 must be a whole number of at least 1"),
        (settings("model.vocabulary=-1"), "model.vocabulary: -1 must be a whole number of at least 1"),
        (settings("batch.global_size=-4"), "batch.global_size: -4 must be a whole number of at least 1"),
        (settings("train.steps=0"), "train.steps: 0 must be a whole number of at least 1"),
        (settings("optimizer.lr=-1"), "optimizer.lr: -1 must be a number of at least 0"),
        (settings("train.steps=many"), 'train.steps: "many" must be a whole number of at least 1'),
        (settings("train.steps=2.5"), "train.steps: 2.5 must be a whole number of at least 1"),
        (settings("model.tied=3"), "model.tied: 3 must be true or false"),
        (settings("optimizer.name=adamv"), 'optimizer.name: "adamv" must be adamw or sgd (did you mean adamw?)'),
        (settings("model.preset=gpt22"), None),
        (settings("train.steps"),
         "--set: 'train.steps' is not of the form section.key=value, for example train.steps=100"),
        (["--port", "70000"], "port 70000 is out of range; legal are 1 to 65535, or none for a free one"),
        (["--port", "free"],
         "Invalid value for '--port': Input should be a valid integer, unable to parse string as an integer; see "
         "meshwright train --help"),
        (["--outt", "x"], None),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(
    job: Path, out: Path, refuse: Refuse, words: Sequence[str], sentence: str | None
) -> None:
    lines = refuse("train", job, "--out", out, *words)
    assert len(lines) == 1
    if sentence is not None:
        assert lines == [sentence]
    assert not out.exists(), "refused before anything is written"


@pytest.mark.parametrize(
    ("pair", "hint"),
    [
        ("model.hiden=4", "model.hiden is not a key of [model]; did you mean hidden? Legal keys are activation, "),
        ("optimzer.lr=1", "optimzer is not a section of a job; did you mean optimizer? Legal sections are batch, "),
        ("train.zzz=1", "train.zzz is not a key of [train]; legal keys are compile, "),
    ],
)
def test_unknown_keys(job: Path, out: Path, refuse: Refuse, pair: str, hint: str) -> None:
    (line,) = refuse("train", job, "--out", out, "--set", pair)
    assert line.startswith(hint)


def test_several_faults_are_said_at_once_one_a_line(job: Path, out: Path, refuse: Refuse) -> None:
    pairs = settings("train.steps=0", "optimizer.lr=fast", "model.hiden=2")
    lines = refuse("train", job, "--out", out, *pairs)
    assert sorted(line.split(" ")[0] for line in lines) == ["model.hiden", "optimizer.lr:", "train.steps:"]
    lines = refuse("train", job, "--out", out, *layout("tp=4 pp=3"))
    assert [line[: line.index(" ", 8)] for line in lines] == ["layout: tp=4", "layout: pp=3"]


@pytest.mark.parametrize(
    ("text", "sentence", "caret"),
    [
        ("dp=0", "layout: dp=0 is not a whole number of at least 1", 3),
        ("dp=2 zer=1", "layout: 'zer' is not a key; did you mean zero?; legal keys are dp, shard, tp, ", 5),
        ("dp=two", "layout: dp=two is not a whole number of at least 1", 3),
        ("pp=2 schedule=gpip", "layout: schedule=gpip is not one of gpipe, 1f1b, ", 14),
    ],
)
def test_layout_text_has_a_caret_under_what_is_wrong(
    job: Path, out: Path, refuse: Refuse, text: str, sentence: str, caret: int
) -> None:
    said, shown, mark = refuse("train", job, "--out", out, *layout(text))
    assert said.startswith(sentence)
    assert (shown, mark) == (f"  {text}", "  " + " " * caret + "^")


def test_a_step_to_go_on_from_without_going_on(job: Path, out: Path, refuse: Refuse) -> None:
    assert refuse("train", job, "--out", out, "--from-step", "2") == [
        "--from-step: 2 is of a run that goes on; give --resume too"
    ]
    assert not out.exists()


def test_ranks_that_torchrun_starts_again_do_not_go_back_twice(
    job: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out.mkdir()
    (out / "job.toml").touch()
    asked: list[object] = []
    monkeypatch.setattr(train_verb, "steps", lambda folder: [2, 4])
    monkeypatch.setattr(train_verb, "settled_layout", lambda job, *_: Planned(job))
    monkeypatch.setattr(train_verb, "prepare_run", lambda *_, from_step, **__: asked.append(from_step))
    monkeypatch.setattr(train_verb, "_be_a_rank", lambda *words: words[4]())
    main_ended(["train", str(job), "--out", str(out), "--resume", "--from-step", "2"])
    assert asked == [None]


@pytest.mark.parametrize(
    ("there", "saved", "begins"),
    [(False, [], (False, False)), (True, [2, 4], (True, True)), (True, [], (False, True))],
)
def test_one_command_starts_and_goes_on(
    job: Path, out: Path, monkeypatch: pytest.MonkeyPatch, there: bool, saved: list[int], begins: tuple[bool, bool]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    out.mkdir()
    if there:
        (out / "job.toml").touch()
    prepared: list[object] = []
    begun: list[object] = []
    monkeypatch.setattr(train_verb, "steps", lambda folder: saved)
    monkeypatch.setattr(train_verb, "settled_layout", lambda job, *_: Planned(job))
    monkeypatch.setattr(train_verb, "prepare_run", lambda *_, resume, **__: prepared.append(resume))
    monkeypatch.setattr(train_verb, "_be_a_rank", lambda *words: begun.append(words[4]()))
    main_ended(["train", str(job), "--out", str(out), "--resume-or-start"])
    assert begun == [begins]
    assert prepared == ([] if there and not saved else [bool(saved)])


def test_resume_or_start_has_one_meaning(job: Path, out: Path, refuse: Refuse) -> None:
    assert refuse("train", job, "--out", out, "--resume", "--resume-or-start") == [
        "--resume-or-start: resumes where there is a run else starts one; leave it or --resume out"
    ]
    (line,) = refuse("train", job, "--out", out, "--layout", "dp=2", "--resume-or-start",
                     *settings("sync.strategy=server"))  # fmt: skip
    assert line == "--resume-or-start: sync.strategy=server replaces its own processes; leave it out"


def main_ended(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0


def test_ranks_that_torchrun_started(
    job: Path, out: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    (line,) = refuse("train", job, "--out", out)
    assert "is 2 ranks, but there are 3 ranks (torchrun); use degrees whose product is 3, or 2 ranks" in line
    monkeypatch.delenv("RANK")
    (line,) = refuse("train", job, "--out", out)
    assert line == "RANK is not set although other rank variables are; set it, or unset them all"


JSONL = b'{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content", "ending"),
    [
        ("none.txt", None, "does not exist; give the path of a file that can be read"),
        ("empty.txt", b"", "is empty (0 bytes); a data file holds at least one document"),
        ("latin.txt", b"caf\xe9 " * 10,
         "is not UTF-8 at byte 3 (invalid continuation byte); convert the file to UTF-8"),
        ("cut.jsonl", JSONL + b'{"text": "th',
         "line 3 column 10 is not JSON (unterminated string starting at) and the file ends there, so it may be cut "
         "short; each line must be one JSON object"),
        ("list.jsonl", JSONL + b"[1]\n", "line 3 is a JSON array; each line must be one JSON object"),
        ("latin.jsonl", JSONL + b'{"text": "\xe9"}\n',
         "line 3 is not UTF-8 at byte 42 of the file (invalid continuation byte); convert the file to UTF-8"),
        ("field.jsonl", JSONL + b'{"txt": "x"}\n',
         "line 3 has no field 'text' (data.text_field); its fields are 'txt'"),
        ("what.xyz", b"abc", None),
    ],
)  # fmt: skip
def test_data_files(
    job: Path, out: Path, refuse: Refuse, tmp_path: Path, name: str, content: bytes | None, ending: str | None
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    (line,) = refuse("train", job, "--out", out, "--set", f"data.train={path}")
    assert line.startswith(f"'{path}' ")
    if ending is not None:
        assert line == f"'{path}' {ending}"
    assert not (out / "job.toml").exists()


def test_token_files_cut_short(job: Path, out: Path, refuse: Refuse, tmp_path: Path) -> None:
    tokens, index = tmp_path / "tokens.bin", tmp_path / "tokens.idx"
    tokens.write_bytes(bytes(20))
    index.write_bytes(b"MMIDIDX\0\0" + bytes(5))
    (line,) = refuse("train", job, "--out", out, "--set", f"data.train={tokens}")
    assert line == f"'{index}' ends at byte 14, inside the header of 34 bytes"
    # One document of 50 tokens of 2 bytes, but only 20 bytes of them.
    index.write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<i", 50) + struct.pack("<qqq", 0, 0, 1)
    )
    (line,) = refuse("train", job, "--out", out, "--set", f"data.train={tokens}")
    assert line == (
        f"'{tokens}' has 20 bytes but sequence 0 of '{index}' is 50 tokens at byte 0; the .bin is cut short or belongs "
        "to another .idx"
    )


def test_tokens_beyond_the_vocabulary(job: Path, out: Path, refuse: Refuse) -> None:
    (line,) = refuse("train", job, "--out", out, *settings("model.vocabulary=100"))
    assert line == (
        "data.tokenizer='bytes' has token ids up to 256 but model.vocabulary=100; use a vocabulary of at least 257 or "
        "another tokenizer"
    )


def test_output_directory(
    job: Path, out: Path, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("all my work")
    assert refuse("train", job, "--out", out) == [
        f"--out: {out} is not empty (it has thesis.tex); give a new directory, or --resume to go on with that run"
    ]
    assert (out / "thesis.tex").read_text() == "all my work"
    inside_a_file = tmp_path / "corpus.txt" / "run"
    assert refuse("train", job, "--out", inside_a_file) == [
        f"--out: {inside_a_file} cannot be used (Not a directory); give a directory you may write"
    ]
    assert refuse("train", job) == ["Missing option '--out'; see meshwright train --help"]
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(prepare.os, "access", lambda path, mode: mode == os.R_OK or Path(path) != locked)
    assert refuse("train", job, "--out", locked) == [
        f"--out: {locked} is not writable; give a directory you may write"
    ]


def test_resume_of_nothing_and_of_another_model(
    job: Path, out: Path, refuse: Refuse, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refuse("train", job, "--out", out, "--resume") == [
        f"--resume: {out} holds no run (no job.toml); leave --resume out to start one"
    ]
    with pytest.raises(AssertionError, match="ranks were started"):
        main(["train", str(job), "--out", str(out)])
    capsys.readouterr()
    before = (out / "job.toml").read_bytes()
    assert refuse("train", job, "--out", out, "--resume", *settings("model.ffn_hidden=96")) == [
        f"--resume: model.ffn_hidden is 96 in this job but 64 in {out}; resume with the model the run began with, or "
        "start a new run"
    ]
    assert refuse("train", job, "--out", out, "--resume", *settings("train.steps=9")) == [
        f"--resume: {out / 'checkpoints'} has no complete checkpoint; start again, without --resume and in a new --out"
    ]
    assert (out / "job.toml").read_bytes() == before


def test_port_in_use(job: Path, out: Path, refuse: Refuse) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refuse("train", job, "--out", out, "--port", port) == [
            f"port {port} on 127.0.0.1 cannot be used (Address already in use); give another, or none for a free one"
        ]
    assert not out.exists(), "the same command with another port must find a new directory"


def test_memory_that_the_job_states(job: Path, out: Path, refuse: Refuse) -> None:
    # 35,040 parameters: float32 values, gradients and two moments are 16 bytes each.
    assert refuse("train", job, "--out", out, *settings("cluster.memory_per_rank_bytes=500_000")) == [
        "cluster.memory_per_rank_bytes: 500,000 bytes a rank, but parameters, gradients and optimizer state of each "
        "rank are 560,640 bytes under layout dp=2 micro_batch=2, before activations; use more ranks (tp, pp), a higher "
        "zero with more dp, or a smaller model"
    ]


def test_memory_that_the_machine_has(
    job: Path, out: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare.psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    (line,) = refuse("train", job, "--out", out)
    assert line.startswith(
        "memory of this machine, 1,000,000 bytes free: 500,000 bytes a rank, but parameters, gradients and optimizer "
        "state of each rank are 560,640 bytes "
    )
    with pytest.raises(AssertionError, match="ranks were started"):  # half of the ranks, and all of it fits
        main(["train", str(job), "--out", str(out), "--layout", "dp=1"])


@pytest.mark.parametrize(
    ("content", "ending"),
    [
        (None, "cannot be read (No such file or directory); give the path of a TOML job file"),
        (b"[model\n", "is not TOML: Expected ']' at the end of a table declaration (at line 1, column 7)"),
        (b'x = "\xff"', "is not UTF-8 at byte 5; a job file is UTF-8 TOML"),
    ],
)
def test_job_files(tmp_path: Path, out: Path, refuse: Refuse, content: bytes | None, ending: str) -> None:
    path = tmp_path / "other.toml"
    if content is not None:
        path.write_bytes(content)
    assert refuse("train", path, "--out", out) == [f"job: {path} {ending}"]
    assert refuse("check", path, "--layout", "dp=2") == [f"job: {path} {ending}"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "check: nothing to check; give --layout, --matrix or --self-test"),
        (["--matrix", "layuots"], "--matrix: 'layuots' is not a matrix; use layouts, sync or reshard"),
        (["--matrix", "sync", "--ledger"],
         "--matrix: sync has no ledgers to compare; use --matrix layouts, or --layout"),
        (["--layout", "dp=2", "--dtype", "bfloat16"],
         "--dtype: 'bfloat16' has no bound to hold; use float64 or float32"),
        (["--layout", "tp=4"], "layout: tp=4 does not divide 2 key/value heads; use 1 or 2"),
        (["--layout", "dp=2", "--matrix", "layouts"],
         "check: --layout and --matrix are proofs of their own; give one of them"),
        (["--matrix", "reshard", "--self-test"],
         "check: --matrix and --self-test are proofs of their own; give one of them"),
        (["--self-test", "--max-ranks", "1"], "--max-ranks: 1 leaves no layout to check; use at least 2"),
        (["--layout", "dp=4 micro_batch=1", "--dtype", "float64", "--max-ranks", "2"],
         "--layout: dp=4 micro_batch=1 takes 4 ranks, all on this machine; use at most 2, or give --max-ranks 4"),
        (["--layout", "dp=4 micro_batch=1", "--ledger", "--max-ranks", "2"],
         "--layout: dp=4 micro_batch=1 takes 4 ranks, all on this machine; use at most 2, or give --max-ranks 4"),
        (["--matrix", "layouts", "--max-ranks", "0"],
         "Invalid value for '--max-ranks': Input should be greater than or equal to 1; see meshwright check --help"),
    ],
)  # fmt: skip
def test_check(job: Path, refuse: Refuse, words: Sequence[str], sentence: str) -> None:
    assert refuse("check", job, *words) == [sentence]


def test_unknown_verbs(refuse: Refuse) -> None:
    assert refuse("trian") == ["No such command 'trian'. Did you mean 'train'?; see meshwright --help"]


def test_json_says_the_error_too(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", str(job), "--json"])
    said = capsys.readouterr()
    sentence = "check: nothing to check; give --layout, --matrix or --self-test"
    assert ended.value.code == 2
    assert json.loads(said.out) == {"error": sentence, "exit_code": 2}
    assert said.err == sentence + "\n"


def test_no_command_waits_for_torch_before_it_knows_that_it_needs_it() -> None:
    """Which takes seconds to load: for help, for a refusal, and in the launcher beside its ranks."""
    program = "import sys, meshwright.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_preparing_a_cpu_run_loads_no_torch(job: Path, out: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from meshwright.job.job import load_job\n"
        "from meshwright.train.prepare import prepare_run\n"
        f"prepare_run(load_job({str(job)!r}, ['cluster.device=cpu']).resolve(), Path({str(out)!r}), resume=False)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
