"""`meshwright plan` the way a user types it: tables, JSON, exit codes, one sentence for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main

MODEL = ["--model", "gpt3-1.3b", "--global-batch", "8", "--sequence", "1024"]
EIGHT = ["--cluster", "1x8 A100-SXM4-80GB"]
JOB = """
[model]
vocabulary = 257
hidden = 64
layers = 4
heads = 4
kv_heads = 2
ffn_hidden = 128

[data]
train = "corpus.txt"
sequence_length = 32

[batch]
global_size = 8

[precision]
dtype = "bfloat16"
"""


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", *words])
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return run


def test_json_without_a_job_file(plan: Any) -> None:
    code, out, _ = plan(*MODEL, *EIGHT, "--top", "3", "--json")
    value = json.loads(out)
    assert code == 0
    assert value["searched"] > 1000 and value["seconds"] > 0
    assert len(value["layouts"]) == 3 and all(entry["fits"] for entry in value["layouts"])
    assert {line["kind"] for line in value["rejected"]} == {"slower"}


def test_tables_name_what_people_look_for(plan: Any) -> None:
    code, out, _ = plan(*MODEL, *EIGHT)
    assert code == 0
    for words in (
        "gpt3-1.3b (1,315,", "predicted against one device", "tokens/s", "MFU", "inside a node", "placement: ",
        "time against memory", "rejected families", "times the fastest", "assumed: links.inter",
    ):  # fmt: skip
        assert words in out, words


def test_one_layout_of_a_job_file_and_its_ledger(plan: Any, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    code, out, _ = plan(str(job), *EIGHT, "--layout", "dp=2 tp=2 pp=2 zero=1", "--explain", "--rank", "5")
    assert code == 0
    assert "1 layout in" in out and "ledger of rank 5 (pp=1 " in out
    code, out, _ = plan(str(job), *EIGHT, "--layout", "dp=8", "--explain", "--json")
    value = json.loads(out)
    assert value["ledger"]["source"] == "predicted" and value["searched"] == 1
    stored = {name: sum(line[2] for line in value["explained"] if line[0] == f"stores: {name}")
              for name in ("parameters", "gradients", "optimizer")}  # fmt: skip
    entry = value["ledger"]["ranks"][0]["stores"]
    assert stored == {name: entry[name] for name in stored}


def test_a_job_names_its_machines(plan: Any, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB + '\n[cluster]\nmachines = "1x4 V100-SXM2-32GB"\n')
    code, out, _ = plan(str(job), "--dtype", "float16", "--json")
    assert code == 0 and json.loads(out)["cluster"] == "1x4 V100-SXM2-32GB"


def test_layouts_side_by_side(plan: Any) -> None:
    code, out, _ = plan("--model", "llama3-8b", "--global-batch", "64", "--sequence", "4096", *EIGHT, "--json",
                        "--compare", "dp=8", "dp=2 tp=4")  # fmt: skip
    replicas, groups = json.loads(out)["compared"]
    assert code == 0
    assert (replicas["groups"], replicas["ranks_of_group"]) == (8, 1)
    assert (groups["groups"], groups["ranks_of_group"]) == (2, 4)
    assert not replicas["state_fits"] and groups["state_fits"] and groups["fits"]
    # 4 bytes a gradient; a ring sends each twice, but for the part a rank keeps.
    (gradients,) = replicas["gradients"]
    assert gradients["wire"] == pytest.approx(4 * 8.03e9 * 2 * 7 / 8, rel=1e-3)
    assert replicas["activations"] == [] and groups["activations"][0]["axis"] == "tp"
    assert {crossing["link"] for crossing in groups["gradients"]} == {"inside a node"}
    code, out, _ = plan(*MODEL, "--cluster", "2x4 A100-SXM4-80GB", "--compare", "dp=8", "dp=2 tp=4")
    assert code == 0
    assert all(words in out for words in ("does the full state", "between nodes", "fastest that fits: dp="))


def test_a_budget_that_nothing_fits_in(plan: Any) -> None:
    code, out, _ = plan("--model", "llama3-70b", "--global-batch", "8", "--sequence", "1024", *EIGHT)
    assert code == 1
    assert "nothing fits; the closest is " in out and " too many; " in out and ": rank " in out
    code, out, _ = plan("--model", "llama3-70b", "--global-batch", "8", "--sequence", "1024", *EIGHT, "--json")
    assert code == 1 and json.loads(out)["layouts"][0]["fits"] is False


def test_days_stand_behind_the_step(plan: Any) -> None:
    code, out, _ = plan(*MODEL, *EIGHT, "--tokens", "1e9", "--price", "2 USD")
    assert code == 0 and "device-hours" in out


def test_what_the_cluster_file_knows_of_days_need_not_be_said(plan: Any, tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    file.write_text(
        'nodes = 1\ndevices_per_node = 8\ndevice = "A100-SXM4-80GB"\nprice_per_device_hour = "2 USD"\n'
        "mtbf_device_hours = 50700\n",
        "utf-8",
    )
    words = [*MODEL, "--layout", "dp=8", "--tokens", "1e9", "--checkpoint-cost", "30s", "--cluster"]
    _, known, _ = plan(*words, str(file))
    _, said, _ = plan(*words, EIGHT[1], "--price", "2 USD", "--mtbf", "50700h/device")
    assert "failures      one in 264 d" in known and known.endswith(" USD\n")
    assert known.partition("\nfailures")[2] == said.partition("\nfailures")[2]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "plan: --model, --global-batch, --sequence missing; give a job file, or"),
        (["--model", "gpt2", "--sequence", "8"], "plan: --global-batch missing; give a job file, or"),
        ([*MODEL, *EIGHT, "--set", "train.steps=3"], "--set: 'train.steps=3' changes a job file, but none is given"),
        ([*MODEL, "--cluster", "8 A100"], "cluster: '8 A100' is neither NODESxDEVICES NAME, such as"),
        ([*MODEL, "--cluster", "1x8 A100-SXM9"], "cluster: 'A100-SXM9' is not a device of the catalogue"),
        ([*MODEL, "--cluster", "1x8 A100-SXM4-80GB + 1x8 V100-SXM2-32GB"], "cluster: '1x8 A100-SXM4-80GB + 1x8"),
        ([*MODEL], "cluster: nothing says which machines to plan for; give --cluster"),
        (
            ["examples/quickstart.toml", "--layout", "dp=4", "--set", "sync.node_size=5"],
            "sync.node_size: 5 is not used by sync.algorithm=auto",  # before what is missing of machines
        ),
        ([*MODEL, *EIGHT, "--dtype", "bf16"], 'precision.dtype: "bf16" must be'),
        ([*MODEL, "--cluster", "1x8 V100-SXM2-32GB"], "cluster.device: V100"),
        ([*MODEL, *EIGHT, "--layout", "tp=3 pp=2"], "layout: tp=3 does not divide"),
        ([*MODEL, *EIGHT, "--compare", "dp=8", "dp=32"], "cluster: 32 ranks are more than the 8 devices"),
        ([*MODEL, *EIGHT, "dp=8"], "plan: 'dp=8' is a layout; give it by --layout, or several by --compare"),
        ([*MODEL, *EIGHT, "--layout", "dp=8", "--explain", "--rank", "8"], "--rank: 8 is not a rank of layout dp=8"),
        (["a.toml", "b.toml"], "plan: a.toml and b.toml are two job files; give one"),
        (["a.toml", "--model", "gpt2"], "plan: --model stands for a job file, but a.toml is given"),
        (["a.toml"], "job: a.toml cannot be read"),
        (["--model", "gtp2", "--global-batch", "8", "--sequence", "8"], "model.preset: 'gtp2' is not a preset"),
        ([*MODEL, *EIGHT, "--top", "0"], "Invalid value for '--top'"),
        ([*MODEL, *EIGHT, "--mtbf", "3h"], "--mtbf: what a failure costs depends on checkpoints"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(plan: Any, words: list[str], sentence: str) -> None:
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert err.startswith(sentence), err
    assert err.count("\n") <= 3


def test_wrong_input_is_an_object_under_json(plan: Any) -> None:
    code, out, err = plan(*MODEL, "--json")
    assert code == 2 and json.loads(out) == {"error": err.strip(), "exit_code": 2}
