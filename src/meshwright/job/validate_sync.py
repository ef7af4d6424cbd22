"""The rules of [sync] with the rest of a job, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.job.job import Job
from meshwright.job.sync_section import TWO_LEVEL_ALGORITHMS, UNCHUNKED, SyncSection
from meshwright.job.validate_compression import compression_problems
from meshwright.job.validate_less_often import less_often_problems
from meshwright.job.validate_server import server_problems


def sync_problems(job: Job) -> Iterator[str]:
    """Everything in [sync] that does not fit the rest of a job whose layout is filled."""
    yield from _algorithm_problems(job)
    yield from compression_problems(job)
    yield from less_often_problems(job)
    yield from server_problems(job)


def _size_problems(sync: SyncSection) -> Iterator[str]:
    other = (
        "strategy" if sync.strategy != "all-reduce"
        else "compression" if sync.compression != "none"
        else "algorithm" if sync.algorithm in UNCHUNKED
        else None
    )  # fmt: skip
    if other is not None and sync.changed("chunk_bytes"):
        yield (
            f"sync.chunk_bytes: {sync.chunk_bytes} is not used by sync.{other}={getattr(sync, other)}; leave it out, "
            "or sum whole gradients by algorithm=ring, tree, halving-doubling, hierarchical, leaders or ordered"
        )
    if sync.bucket_bytes is not None and sync.strategy == "server":
        yield (
            f"sync.bucket_bytes: {sync.bucket_bytes} is not used by sync.strategy=server, which sums no buckets; leave "
            "it out"
        )


def unused_sizes(job: Job) -> dict[str, str]:
    """Sizes in [sync] that would have an effect under other layouts, but not this one: by key, in a sentence."""
    sync, layout, found = job.sync, job.layout, dict[str, str]()
    if layout.zero == 0 or layout.shard_degree == 1:
        return found
    if sync.bucket_bytes is not None and layout.zero >= 2:
        found["bucket_bytes"] = (
            f"sync.bucket_bytes: {sync.bucket_bytes} is not used with zero={layout.zero}, which sums the gradients of "
            "each layer by themselves; leave it out, or use zero=0 or 1"
        )
    if sync.changed("chunk_bytes") and layout.shard_degree == layout.dp:
        found["chunk_bytes"] = (
            f"sync.chunk_bytes: {sync.chunk_bytes} cuts all-reduces, but with zero={layout.zero} over all {layout.dp} "
            "dp ranks gradients are summed by reduce-scatters alone; leave it out, or use zero=0 or a shard below dp"
        )
    return found


def _algorithm_problems(job: Job) -> Iterator[str]:
    sync, ranks = job.sync, job.layout.ranks
    if sync.algorithm in TWO_LEVEL_ALGORITHMS:
        if sync.node_size is None:
            yield (
                f"sync.node_size is missing, but sync.algorithm={sync.algorithm} must know which ranks share a node; "
                f"give the ranks of a node, 1 to {ranks}"
            )
        elif sync.node_size > ranks:
            yield f"sync.node_size: {sync.node_size} is above the {ranks} ranks of the layout; use 1 to {ranks}"
    elif sync.node_size is not None and (sync.compression == "none" or sync.compression_level != "slow"):
        yield (
            f"sync.node_size: {sync.node_size} is not used by sync.algorithm={sync.algorithm}; leave it out, or use "
            f"algorithm={' or '.join(sorted(TWO_LEVEL_ALGORITHMS))}, or compression_level=slow with a compression"
        )
    yield from _size_problems(sync)
    if job.train.deterministic and sync.algorithm != "auto":
        yield (
            f"sync.algorithm: {sync.algorithm} would replace the one order of sums that train.deterministic=true keeps "
            "for every dp; use algorithm=auto, or deterministic=false"
        )
    if job.cluster.device == "cuda" and sync.algorithm not in ("auto", "direct", "backend"):
        yield (
            f"sync.algorithm: {sync.algorithm} sends from host memory, but cluster.device=cuda; use auto, direct or "
            "backend, or device=cpu"
        )
