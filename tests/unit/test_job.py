"""The job file: what it reads, what it refuses and how, and that it writes itself back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.job.job import Job, job_from_values, load_job
from meshwright.job.layout import Layout
from meshwright.job.presets import preset
from tests.command_line import write_job

MINIMAL = """
[model]
preset = "llama-10m"
[data]
train = "corpus.txt"
sequence_length = 64
[batch]
global_size = 8
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(MINIMAL)
    return file


def wrong(file: Path, *overrides: str, layout: str | None = None) -> list[str]:
    with pytest.raises(InputError) as error:
        load_job(file, overrides, layout)
    assert error.value.exit_code == 2
    return str(error.value).splitlines()


def test_minimal_job_has_the_documented_defaults(job_file: Path) -> None:
    job = load_job(job_file)
    assert job.model_spec == preset("llama-10m")
    assert job.data.train == (str(job_file.parent / "corpus.txt"),)
    assert job.data.tokenizer == "bytes"
    assert job.data.cache == str(job_file.parent / ".cache")
    assert job.optimizer.clip_norm is None
    assert job.memory.bucket_bytes == 25 * 1024 * 1024
    assert job.observe.ledger_step == 3
    assert job.layout == Layout()


def test_sizes_override_the_preset_and_derived_sizes_follow() -> None:
    job = job_from_values(
        {
            "model": {"preset": "gpt2", "hidden": 64, "ffn_hidden": 128, "heads": 4},
            "data": {"train": "x", "sequence_length": 8},
            "batch": {"global_size": 1},
        }
    )
    assert (job.model.head_size, job.model.kv_heads, job.model.layers, job.model.tied) == (16, 4, 12, True)
    assert job.resolve().model.preset is None
    job = job_from_values({**_values(), "model": {"preset": "mistral-7b", "sliding_window": 0}})
    assert job.model.sliding_window is None


def _values(**sections: Any) -> dict[str, Any]:
    return {
        "model": {"preset": "llama-10m"},
        "data": {"train": "/corpus.txt", "sequence_length": 64, "cache": "/cache"},
        "batch": {"global_size": 8},
        **sections,
    }


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"layout": "dp=2 tp=2 pp=2 zero=1 recompute=full,none stages=5,3"},
        {"model": {"preset": "llama3-405b"}, "layout": {"placement": [1, 0], "dp": 2}},
        {"optimizer": {"name": "sgd", "lr": 1e-7, "momentum": 0.9, "clip_norm": 1, "decay_steps": 3}},
        {"data": {"train": ["/a b.txt", '/ü"\\\x7f\n.txt'], "validation": 0.1, "sequence_length": 4, "cache": "/c"}},
        {"data": {"train": "/a", "validation": ["/v"], "sequence_length": 4, "cache": "/c", "prompt_field": "q"}},
        {"observe": {"sample_prompt": "a\t\"b\"\nc"}, "train": {"deterministic": True, "eval_every": 2}},
    ],
)  # fmt: skip
def test_written_job_reads_back_equal(tmp_path: Path, sections: dict[str, Any]) -> None:
    job = job_from_values(_values(**sections))
    plan = job.resolve(purpose="plan")
    for written in (plan, plan.with_layout(Layout(tp=2))):
        file = tmp_path / "resolved.toml"
        file.write_text(written.to_toml(), encoding="utf-8")
        assert load_job(file) == written
        assert load_job(file).to_toml() == written.to_toml()
    assert plan.resolve(purpose="plan") == plan


def test_set_replaces_single_values(job_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    job = load_job(
        job_file,
        [
            "optimizer.lr=0.5",
            "train.deterministic=true",
            "optimizer.schedule=cosine",
            "layout.stages=5,3",
            "layout.pp=2",
            "optimizer.betas=[0.8, 0.9]",
            "data.validation=held.txt",
        ],
    )
    assert job.optimizer.lr == 0.5
    assert job.train.deterministic is True
    assert job.optimizer.schedule == "cosine"
    assert job.layout.stages == (5, 3)
    assert job.optimizer.betas == (0.8, 0.9)
    assert job.data.validation == (os.path.join(elsewhere, "held.txt"),)
    assert job.source("layout.pp") == "--set"
    assert job.source("data.sequence_length") == "job.toml"
    assert job.source("layout.dp") == "default"


def test_layout_text_replaces_the_section_but_keeps_the_micro_batch(job_file: Path) -> None:
    job_file.write_text(MINIMAL + "[layout]\ndp = 4\nmicro_batch = 2\nzero = 3\n")
    job = load_job(job_file, layout="tp=2")
    assert job.layout == Layout(tp=2, micro_batch=2)
    assert (job.source("layout.tp"), job.source("layout.zero")) == ("--layout", "default")
    assert load_job(job_file, layout="tp=2 micro_batch=4").layout.micro_batch == 4


def test_layout_as_one_string(job_file: Path) -> None:
    job_file.write_text('layout = "dp=2 tp=2"\n' + MINIMAL)
    assert load_job(job_file).layout == Layout(dp=2, tp=2)
    assert load_job(job_file, ["layout.tp=4"]).layout == Layout(dp=2, tp=4)


def test_all_faults_are_reported_at_once(job_file: Path) -> None:
    job_file.write_text(
        """
        [model]
        preset = "llama-10m"
        head = 3
        [data]
        sequence_lenght = 4
        validation = 1.5
        packing = "streams"
        [batch]
        global_size = 0
        [optimizer]
        lr = "fast"
        betas = [0.9]
        [train]
        deterministic = 1
        [layout]
        stages = [3, -1]
        [layot]
        dp = 2
        """
    )
    assert [line.split("; legal")[0].split("? Legal")[0] for line in wrong(job_file)] == [
        "model.head is not a key of [model]; did you mean heads",
        "data.validation: 1.5 must be a number above 0 and below 1 or a list of strings",
        "data.sequence_length is missing; give a whole number of at least 1",
        'data.packing: "streams" must be stream or best-fit (did you mean stream?)',
        "data.sequence_lenght is not a key of [data]; did you mean sequence_length",
        "batch.global_size: 0 must be a whole number of at least 1",
        'optimizer.lr: "fast" must be a number of at least 0',
        "optimizer.betas: [0.9] must be a list of 2 values, each a number of at least 0 and below 1",
        "train.deterministic: 1 must be true or false",
        "layout.stages: -1 at position 1 is not allowed; it must be a list, each a whole number of at least 0",
        "layot is not a section of a job; did you mean layout",
    ]


def test_legal_keys_are_listed(job_file: Path) -> None:
    assert wrong(job_file, "checkpoint.often=3") == [
        "checkpoint.often is not a key of [checkpoint]; legal keys are copy_to, damaged, drill_every, every, "
        "failure, incremental, interval, keep, keep_every, keep_hours, mode, mtbf_hours"
    ]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.lr=-1", "optimizer.lr: -1 must be a number of at least 0"),
        ("optimizer.lr=nan", "optimizer.lr: nan must be a number of at least 0"),
        ("model.dropout=1.0", "model: dropout=1.0 must be at least 0 and below 1"),
        ("model.kv_heads=3", "model: kv_heads=3 does not divide heads=8; use 1, 2, 4 or 8"),
        ("model.layers=2.5", "model.layers: 2.5 must be a whole number of at least 1"),
        ("model.layers=true", "model.layers: true must be a whole number of at least 1"),
        ("precision.dtype=bfloat61", 'precision.dtype: "bfloat61" must be float64, float32, bfloat16 or float16 '
         "(did you mean bfloat16?)"),
        ("layout.zero=4", "layout: zero=4 is not a ZeRO stage; use 0, 1, 2 or 3"),
        ("model.preset=lama-10m", "model.preset: 'lama-10m' is not a preset; did you mean llama-10m?"),
        ("train", "--set: 'train' is not of the form section.key=value, for example train.steps=100"),
        ("a.b.c=1", "--set: 'a.b.c=1' is not of the form section.key=value, for example train.steps=100"),
    ],
)  # fmt: skip
def test_a_wrong_value_says_value_rule_and_legal_values(job_file: Path, override: str, sentence: str) -> None:
    assert wrong(job_file, override)[0].startswith(sentence)


def test_auto_layout_waits_for_the_planner(job_file: Path) -> None:
    given = load_job(job_file, layout="auto")
    job_file.write_text('layout = "auto"\n' + MINIMAL)
    job = load_job(job_file)
    assert job.auto and given.auto and load_job(job_file, ["layout=auto"]).auto
    assert not load_job(job_file, layout="dp=2").auto
    assert not job.with_layout(Layout(dp=2)).auto
    with pytest.raises(InputError, match=r"auto has not been resolved; ask meshwright\.plan"):
        job.resolve()
    assert wrong(job_file, "layout.tp=2")[0] == (
        "layout: auto stands for a whole layout, to be planned; give the degrees here"
    )
    job_file.write_text(job.to_toml())
    assert load_job(job_file).auto
    assert job != job.with_layout(Layout())


def test_unreadable_files_are_named_with_the_position(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    assert wrong(file) == [f"job: {file} cannot be read (No such file or directory); give the path of a TOML job file"]
    file.write_bytes(b"[model]\nname = '\xff'\n")
    assert wrong(file) == [f"job: {file} is not UTF-8 at byte 16; a job file is UTF-8 TOML"]
    file.write_text("[model]\nlayers = = 3\n")
    assert wrong(file)[0].startswith(f"job: {file} is not TOML: ")
    assert "line 2" in wrong(file)[0]


def test_hugging_face_folder_gives_the_shape(tmp_path: Path, job_file: Path) -> None:
    config = {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    }  # fmt: skip
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for key in ("hf", "init_from"):
        job_file.write_text(MINIMAL.replace('preset = "llama-10m"', f'{key} = "tiny"\nlayers = 2'))
        spec = load_job(job_file).model_spec
        assert (spec.vocabulary, spec.kv_heads, spec.layers, spec.rope_theta) == (97, 2, 2, 5e5)
    (folder / "config.json").write_text('{"model_type": ')
    file = folder / "config.json"
    assert wrong(job_file) == [
        f"model.init_from: {file} is not JSON at line 1, column 16 (Expecting value); give a config.json"
    ]
    (folder / "config.json").write_text('{"model_type": "gemma"}')
    assert wrong(job_file) == [
        'model: config.json: model_type="gemma" is not built; use one of gpt2, llama, qwen2, qwen3, mistral, mixtral'
    ]
    job_file.write_text(MINIMAL.replace("[data]", 'hf = "tiny"\n[data]'))
    assert wrong(job_file) == ["model: preset and hf are both given; give one of them"]


def test_equal_jobs_are_equal_whatever_their_sources() -> None:
    job = job_from_values(_values())
    assert job == job_from_values(_values()) and hash(job) == hash(job_from_values(_values()))
    assert job != job.with_layout(Layout(dp=2)) and job != 3
    assert isinstance(job, Job)


def test_the_quickstart_resolves() -> None:
    job = load_job(Path(__file__).parents[2] / "examples" / "quickstart.toml").resolve()
    assert (job.layout.dp, job.layout.tp, job.layout.ranks) == (2, 2, 4)
    assert all(Path(path).exists() for path in (*job.data.train, job.data.tokenizer))


def test_a_byte_order_mark_is_no_part_of_a_job(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    plain = load_job(job)
    job.write_bytes(b"\xef\xbb\xbf" + job.read_bytes())
    assert load_job(job) == plain
