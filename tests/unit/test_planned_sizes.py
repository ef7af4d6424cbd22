"""Sizes of [sync] beside ``layout = "auto"``: kept where the planner's layout uses them, and no reason to refuse it."""

from __future__ import annotations

import pytest

from meshwright.job.job import load_job
from meshwright.job.layout_text import parse_layout
from meshwright.verbs import _with_planned


@pytest.mark.parametrize(
    ("layout", "kept"),
    [("dp=2", (512, 1024)), ("dp=2 zero=1", (512, 4 << 20)), ("dp=2 zero=3", (None, 4 << 20)),
     ("dp=4 shard=2 zero=2", (None, 1024))],
)  # fmt: skip
def test_what_the_planned_layout_uses(layout: str, kept: tuple[int | None, int]) -> None:
    sizes = ["sync.bucket_bytes=512", "sync.chunk_bytes=1024", "sync.algorithm=ring"]
    job = load_job("examples/quickstart.toml", sizes, "auto")
    planned = _with_planned(job, parse_layout(layout), "planned").resolve()
    assert (planned.sync.bucket_bytes, planned.sync.chunk_bytes) == kept
