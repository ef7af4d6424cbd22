"""Cases of ``--matrix sync``: every all-reduce algorithm under every kind of data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.job.layout_text import parse_layout
from meshwright.prove.matrix import Case


def algorithm_cases() -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each with the values of its [sync] section."""
    yield Case("direct, dp=2", parse_layout("dp=2 micro_batch=4")), {"algorithm": "direct"}
