"""The quick-start job on two hosts: the kernel's counters of the link against the ledger that the run wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.hosts import ROOT, TwoHosts

FEW, MORE = 4, 8
LAYOUT = "dp=2 tp=2"
"""Tensor parallel inside a host, data parallel between them: ranks 0 and 1 are host 0."""


def train(hosts: TwoHosts, out: Path, steps: int) -> list[int]:
    """Train on both hosts; bytes each host sent over the link, from start to end."""
    arguments = ["train", str(ROOT / "examples" / "quickstart.toml"), "--out", str(out), "--layout", LAYOUT]
    quick = {"data.validation": 0.005, "observe.sample_tokens": 1, "observe.one_device_steps": 0}
    for key, value in {"train.steps": steps, **quick}.items():
        arguments += ["--set", f"{key}={value}"]
    before = [hosts.counters(host).sent for host in range(2)]
    hosts.run_both(hosts.torchrun(2, "meshwright.cli.main", arguments), timeout=170)
    return [hosts.counters(host).sent - sent for host, sent in enumerate(before)]


@pytest.mark.all
@pytest.mark.timeout(400)
def test_bytes_on_the_link_are_those_of_the_ledger(hosts: TwoHosts, tmp_path: Path) -> None:
    few, more = (train(hosts, tmp_path / f"{steps}-steps", steps) for steps in (FEW, MORE))
    ledger = json.loads((tmp_path / f"{MORE}-steps" / "ledger.json").read_text())
    assert ledger["world"] == 4
    for host in range(2):
        entries = [entry for rank in ledger["ranks"][2 * host : 2 * host + 2] for entry in rank["sends"]]
        between_hosts = sum(entry["wire"] for entry in entries if entry["axis"] == "dp")
        inside_hosts = sum(entry["wire"] for entry in entries if entry["axis"] == "tp")
        # Start-up, validation, sampling and the checkpoint are the same in both runs: the difference is the steps'.
        a_step = (more[host] - few[host]) / (MORE - FEW)
        assert a_step == pytest.approx(between_hosts, rel=0.05)
        assert inside_hosts > between_hosts / 2, "else it would not be seen if the wrong axis crossed"
