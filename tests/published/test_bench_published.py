"""The bench against published measurements, on a sample of them with the sources that published them.

``measured_runs.json``: mosaicml/llm-foundry, pytorch/torchtitan, foundation-model-stack/fms-fsdp, bigscience (BLOOM),
Narayanan et al. 2021, VIA-Research/vTrain, MooreThreads/SimuMax, NVIDIA-NeMo/Megatron-Bridge, MLPerf; each row names
its file. ``vtrain_single_node_sample.csv``: VIA-Research/vTrain data/ground_truth_single.csv, every 18th row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.published import published, spearman
from bench.published_rows import read_rows
from meshwright.errors import InputError

_HERE = Path(__file__).parent
_RUNS, _TABLE = _HERE / "measured_runs.json", _HERE / "vtrain_single_node_sample.csv"
_ROW_KEYS = {
    "id", "usable", "reason", "measured_step_time_s", "predicted_step_time_s", "error", "measured_memory_bytes",
    "predicted_memory_bytes",
}  # fmt: skip
_SUMMARY_KEYS = {
    "rows", "usable", "median_abs_error", "p90_abs_error", "bias", "memory_median_abs_error", "false_fits", "false_oom",
}  # fmt: skip


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """Everything the command reports of the sample."""
    return published(str(_RUNS))


def test_json_has_the_promised_keys(result: dict[str, Any]) -> None:
    assert {"rows", "overall", "sources", "groups"} <= set(result)
    assert all(set(row) >= _ROW_KEYS for row in result["rows"])
    assert all(set(one) >= _SUMMARY_KEYS for one in (result["overall"], *result["sources"].values()))
    assert all(set(group) == {"name", "rows", "spearman"} for group in result["groups"])


def test_step_times_of_rows_not_fitted_on(result: dict[str, Any]) -> None:
    overall = result["overall"]
    assert overall["usable"] >= 30
    assert overall["median_abs_error"] <= 0.08
    assert overall["p90_abs_error"] <= 0.20


def test_memory(result: dict[str, Any]) -> None:
    overall = result["overall"]
    assert overall["memory_rows"] >= 8
    assert overall["memory_median_abs_error"] <= 0.05
    assert overall["false_fits"] == 0
    assert overall["false_oom"] <= 0.02 * overall["usable"]
    ran_out = [row for row in result["rows"] if row["measured_out_of_memory"]]
    assert ran_out
    assert not any(row["predicted_fits"] for row in ran_out)


def test_every_row_is_usable_or_says_why(result: dict[str, Any]) -> None:
    allowed = ("missing field: ", "experts", "context parallel", "precision ", "unknown device")
    for row in result["rows"]:
        assert row["usable"] == (row["reason"] is None)
        assert row["usable"] or row["reason"].startswith(allowed)
    reasons = {row["id"]: row["reason"] for row in result["rows"] if not row["usable"]}
    assert reasons["bloom-005"] == "missing field: model.layers"
    assert reasons["mlperf-003"] == "precision fp8: fp8 or fp4"
    assert reasons["titan-005"] == "context parallel"


def test_table_of_single_node_runs() -> None:
    result = published(str(_TABLE))
    assert result["overall"]["usable"] + result["calibration"]["usable"] == len(result["rows"]) > 30
    assert result["overall"]["median_abs_error"] <= 0.08
    times = [(row["predicted_step_time_s"], row["measured_step_time_s"]) for row in result["rows"]]
    assert spearman(*map(list, zip(*times, strict=True))) > 0.97


def _row(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": "x-1",
        "source": "a test",
        "model": {"name": "GPT-8.3B", "layers": 72, "hidden": 3072, "heads": 24, "seq": 1024},
        "hardware": {"gpu": "V100-SXM2-32GB", "gpus": 512, "gpus_per_node": 16},
        "layout": {"dp": 64, "tp": 8, "pp": 1},
        "global_batch": 512,
        "micro_batch": 8,
        "precision": "fp16",
        "measured": {"step_time_s": 2.0},
    }
    return row | changes


def _only(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([_row(**changes)]), "utf-8")
    only: dict[str, Any] = published(str(file))["rows"][0]
    return only


def test_megatron_8_3b_is_not_mixed_with_its_misquotation(tmp_path: Path) -> None:
    """The run had 512 GPUs, 8-way model times 64-way data; some texts say 4,096."""
    assert _only(tmp_path)["usable"]
    misquoted = _only(tmp_path, hardware={"gpu": "V100-SXM2-32GB", "gpus": 4096, "gpus_per_node": 16})
    assert misquoted["reason"] == "inconsistent: dp 64 x tp 8 x pp 1 is not 4096 gpus"


def test_megatron_8_3b_reaches_76_percent_of_linear(tmp_path: Path) -> None:
    """15.1 PFLOP/s on 512 GPUs against 39 TFLOP/s on one (arXiv 1909.08053): the step time follows from FLOP/s."""
    rate = 15.1e15 / 512
    seconds = _only(tmp_path, measured={"tflops_per_gpu": rate / 1e12}, flops_convention="model, non-causal")
    alone = _only(tmp_path, measured={"tflops_per_gpu": 39.0}, flops_convention="model, non-causal")
    assert alone["measured_step_time_s"] / seconds["measured_step_time_s"] == pytest.approx(0.76, abs=0.005)


def test_a_row_faster_than_its_devices_is_an_error_of_the_row(tmp_path: Path) -> None:
    assert _only(tmp_path)["warning"] is None
    warning = _only(tmp_path, measured={"step_time_s": 0.2})["warning"]
    assert "dense peak of 512 V100-SXM2-32GB" in warning


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": {"gpu": "Z9", "gpus": 8}}, "unknown device"),
        ({"hardware": {"gpus": 8}}, "missing field: hardware.gpu"),
        ({"model": {"layers": 2, "hidden": 64, "seq": 128}}, "missing field: model.heads"),
        ({"model": {"layers": 2, "hidden": "wide", "heads": 8, "seq": 128}}, "missing field: model.hidden ('wide'"),
        ({"micro_batch": 0}, "missing field: micro_batch (0 is no number above 0)"),
        ({"measured": {}}, "missing field: measured"),
        ({"precision": "MXFP8"}, "precision MXFP8"),
        ({"layout": {"dp": 64, "tp": 8, "pp": 1, "cp": 2}}, "context parallel"),
        ({"layout": {"dp": 64, "tp": 8, "pp": 1, "ep": 8}}, "experts"),
    ],
)
def test_reasons(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    assert _only(tmp_path, **changes)["reason"].startswith(reason)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(tmp_path / "absent.json")
    cut = tmp_path / "cut.json"
    cut.write_text('[{"id": 1', "utf-8")
    with pytest.raises(InputError, match="not JSON"):
        read_rows(cut)
    table = tmp_path / "short.csv"
    table.write_text("# GPUs,...\n2,16,8\n", "utf-8")
    with pytest.raises(InputError, match="line 2: expected 11 numbers"):
        read_rows(table)


def test_command_prints_json_alone_and_exits_2_on_wrong_input() -> None:
    command = [sys.executable, "-m", "bench.published"]
    root = _HERE.parents[1]
    good = subprocess.run([*command, str(_RUNS), "--json"], capture_output=True, text=True, cwd=root, check=False)
    assert good.returncode == 0
    assert set(json.loads(good.stdout)) >= {"rows", "overall", "sources", "groups"}
    bad = subprocess.run([*command, "absent.json"], capture_output=True, text=True, cwd=root, check=False)
    assert (bad.returncode, bad.stdout, len(bad.stderr.splitlines())) == (2, "", 1)
