"""The [sync] section of a job file: how the data parallel ranks agree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from meshwright.job.server_keys import ServerKeys
from meshwright.job.sync_keys import CompressionKeys, LessOftenKeys

Algorithm = Literal[
    "auto", "direct", "backend", "ring", "tree", "halving-doubling", "hierarchical", "leaders", "ordered"
]
TWO_LEVEL_ALGORITHMS: frozenset[str] = frozenset({"hierarchical", "leaders"})
"""Algorithms that treat ranks of one node apart from the others, so they must know the nodes."""
UNCHUNKED: frozenset[str] = frozenset({"direct", "backend"})
"""Algorithms that do not send in chunks of ``chunk_bytes``."""


class SyncSection(CompressionKeys, LessOftenKeys, ServerKeys):
    """[sync]: how the data parallel ranks agree."""

    strategy: Literal["all-reduce", "local", "easgd", "diloco", "server"] = "all-reduce"
    """``all-reduce``: gradients are summed over all ranks in every step; ``server``: server processes own the
    parameters and the optimizer, and the dp ranks are workers; the others: replicas train apart and meet every
    ``period`` steps."""
    algorithm: Algorithm = "auto"
    """How the sum is taken; ``auto``: by size and links; ``ordered``: in the order of the ranks, to the last bit."""
    node_size: PositiveInt | None = None
    """``hierarchical``, ``leaders``, and ``compression_level = "slow"`` with ``zero=0``: consecutive ranks that share a
    node, tensor and pipeline ranks with them."""
    bucket_bytes: PositiveInt | Literal["auto"] | None = None
    """Gradients are summed in buckets of this size, in bytes, while backward runs; ``auto``: by the links of
    ``cluster.machines``; absent: ``memory.bucket_bytes``. With ``zero`` of 0 or 1."""
    chunk_bytes: Annotated[int, Field(ge=256)] = 4 * 2**20
    """Longer all-reduces go in chunks of so many bytes, whose messages and additions overlap; ``auto``, ``direct`` and
    ``backend`` see to that themselves. With ``zero`` of at least 1: sums over copies alone (``shard`` below ``dp``)."""
