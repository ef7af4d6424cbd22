"""Cases of ``--matrix sync``: every all-reduce algorithm under every kind of data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.job.layout_text import parse_layout
from meshwright.job.sync_section import UNCHUNKED
from meshwright.prove.matrix import Case

ALGORITHMS = ("direct", "backend", "ring", "tree", "halving-doubling", "hierarchical", "leaders", "ordered")
KINDS = ("zero=0", "zero=1", "zero=2", "zero=3", "shard=2 zero=1", "shard=2 zero=3")
"""Replicated, ZeRO 1 to 3, and shards of two with copies (HSDP)."""
MESHES = ("dp=3", "dp=4", "dp=2 tp=2", "dp=2 pp=2")


def algorithm_cases() -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each with the values of its [sync] section. Chunks are small, so that there are several."""
    for mesh in MESHES:
        for kind in KINDS:
            degrees = mesh
            if kind.startswith("shard"):
                if mesh == "dp=3":
                    continue
                degrees = mesh.replace("dp=2", "dp=4")
            for algorithm in ALGORITHMS:
                layout = parse_layout(f"{degrees} {kind} micro_batch=1")
                values: dict[str, Any] = {"algorithm": algorithm}
                if algorithm not in UNCHUNKED and (layout.zero == 0 or layout.replicas > 1):
                    values["chunk_bytes"] = 1 << 14
                if algorithm in ("hierarchical", "leaders"):
                    values["node_size"] = max(2, layout.ranks // 2)
                yield Case(f"{algorithm}, {degrees} {kind}", layout), values
