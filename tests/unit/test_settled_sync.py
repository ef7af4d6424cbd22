"""``sync.algorithm = "auto"`` and ``bucket_bytes = "auto"`` where the machines are known: settled before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.auto import settled_sync
from meshwright.errors import InputError
from tests.small_jobs import small_job


def machines(folder: Path, *, host: bool = True) -> str:
    """Two hosts of two CPU ranks behind a slow link."""
    values: dict[str, Any] = {
        "nodes": 2, "devices_per_node": 2, "device": "A100-SXM4-80GB",
        "links": {
            "intra": {"kind": "shared memory", "bandwidth": 4e9, "latency": 1e-5},
            "inter": {"kind": "ethernet", "bandwidth": 12.5e6, "latency": 1e-4},
        },
    }  # fmt: skip
    if host:
        values["host"] = {"cores": 2}
    file = folder / "cluster.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return str(file)


def job(folder: Path, *, host: bool = True, sync: dict[str, Any] | None = None, **others: dict[str, Any]) -> Any:
    cluster = {"machines": machines(folder, host=host)}
    return small_job("dp=4 micro_batch=1", sync=sync or {}, cluster=cluster, **others)


def test_a_slow_link_takes_a_two_level_form_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settled = settled_sync(job(tmp_path), False)
    assert settled.sync.algorithm in ("hierarchical", "leaders") and settled.sync.node_size == 2
    assert f"planned sync.algorithm={settled.sync.algorithm}" in capsys.readouterr().err


def test_the_bucket_size_is_settled_too(tmp_path: Path) -> None:
    settled = settled_sync(job(tmp_path, sync={"bucket_bytes": "auto", "algorithm": "ring"}), True)
    assert settled.sync.algorithm == "ring" and isinstance(settled.sync.bucket_bytes, int)
    assert settled.bucket_bytes == settled.sync.bucket_bytes != settled.memory.bucket_bytes


@pytest.mark.parametrize(
    ("host", "others"),
    [(False, {}), (True, {"sync": {"algorithm": "direct"}}), (True, {"train": {"deterministic": True}})],
)
def test_what_is_given_or_not_measured_stays(tmp_path: Path, host: bool, others: dict[str, Any]) -> None:
    before = job(tmp_path, host=host, **others)
    assert settled_sync(before, True).sync == before.sync


def test_buckets_by_links_of_which_nothing_is_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="auto goes by measured links, which"):
        settled_sync(small_job("dp=2", sync={"bucket_bytes": "auto"}), True)
    with pytest.raises(InputError, match=r"cluster.machines=.*cluster.json has not"):
        settled_sync(job(tmp_path, host=False, sync={"bucket_bytes": "auto"}), True)
