"""What a job becomes when a rank is lost and not replaced, where [sync] asks for more ranks than are left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.job.job import Job, load_job
from meshwright.job.layout_text import parse_layout
from meshwright.job.recovery_section import RecoverySection
from meshwright.job.sync_section import SyncSection
from meshwright.recovery.reporting import Reporting
from meshwright.recovery.shrink import fewer_ranks, set_back

INT8 = "sync.compression=int8"
SLOW = (INT8, "sync.compression_level=slow")
DILOCO = ("sync.strategy=diloco", "sync.period=8")
GROUPS = ("sync.strategy=local", "sync.group_size=2", "sync.group_period=4")
TWO_LEVELS = "sync.algorithm=hierarchical"


def quickstart(layout: str, *settings: str) -> Job:
    """The quick-start job under a layout and with settings."""
    return load_job("examples/quickstart.toml", settings, layout).resolve()


@pytest.mark.parametrize(
    ("layout", "settings", "left", "then", "keys"),
    [
        ("dp=2", (), 1, "dp=1", ""),
        ("dp=2", (INT8, "sync.compression_block=64"), 1, "dp=1", "compression compression_block"),
        ("dp=2", ("sync.compression=bf16", "sync.bucket_bytes=4096"), 1, "dp=1", "compression"),
        ("dp=2", DILOCO, 1, "dp=1", "strategy period"),
        ("dp=2", (*DILOCO, "sync.compression=dgc", "sync.outer_lr=1.0"), 1, "dp=1",
         "strategy period outer_lr compression"),
        ("dp=2", (TWO_LEVELS, "sync.node_size=2"), 1, "dp=1", "algorithm node_size"),
        ("dp=4", (TWO_LEVELS, "sync.node_size=2", "sync.chunk_bytes=5000"), 3, "dp=3", ""),
        ("dp=4 shard=2 zero=2", DILOCO, 3, "dp=3 zero=2", "strategy period"),
        ("dp=4 shard=2 zero=2", (*DILOCO, INT8), 3, "dp=3 zero=2", "strategy period compression"),
        ("dp=4 shard=2", DILOCO, 3, "dp=3", ""),
        ("dp=6 shard=2 zero=2", DILOCO, 5, "dp=4 shard=2 zero=2", ""),
        ("dp=8 shard=2", DILOCO, 7, "dp=6 shard=2", ""),
        ("dp=4", (*SLOW, "sync.node_size=2"), 3, "dp=3", "compression_level node_size"),
        ("dp=8", (*SLOW, "sync.node_size=2"), 7, "dp=6", ""),
        ("dp=4 shard=2 zero=2", SLOW, 3, "dp=3 zero=2", "compression_level"),
        ("dp=6 shard=2 zero=2", SLOW, 5, "dp=4 shard=2 zero=2", ""),
        ("dp=4", GROUPS, 3, "dp=3", "group_size group_period"),
        ("dp=4 shard=2 zero=2", ("sync.algorithm=ring", "sync.chunk_bytes=512"), 3, "dp=3 zero=2", "chunk_bytes"),
        ("dp=2 tp=2", (INT8,), 3, "tp=2", "compression"),
    ],
)  # fmt: skip
def test_what_is_kept(layout: str, settings: tuple[str, ...], left: int, then: str, keys: str) -> None:
    job = quickstart(layout, *settings)
    smaller = fewer_ranks(job, left)
    assert smaller is not None
    assert smaller.layout.model_copy(update={"micro_batch": None}) == parse_layout(then)
    assert smaller.resolve(smaller.layout.ranks).sync == smaller.sync, "it stands all rules of a job"
    gone, why = set_back(job, smaller)
    assert gone == {f"sync.{key}": getattr(job.sync, key) for key in keys.split()}
    assert bool(why) is bool(keys) and all(sentence.partition(":")[0] in gone for sentence in why)
    assert all(getattr(smaller.sync, key) == SyncSection.model_fields[key].default for key in keys.split())


def test_it_is_said_what_was_set_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = quickstart("dp=2", INT8)
    smaller = fewer_ranks(job, 1)
    assert smaller is not None
    report = Reporting(tmp_path, RecoverySection())
    report.layout_changed(job, smaller, 1)
    report.layout_changed(job, job, 2)
    fewer, again = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert fewer["event"] == again["event"] == "layout-changed" and (fewer["ranks"], again["ranks"]) == (1, 2)
    assert fewer["set_back"] == {"sync.compression": "int8"} and "set_back" not in again
    assert fewer["because"] == ["sync.compression: int8 has nothing to send with dp=1"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("going on under layout ") and line.endswith(
        "(1 of 2 ranks), without sync.compression (was int8): sync.compression: int8 has nothing to send with dp=1"
    )
