"""The ways to synchronise a job: each all-reduce, each compression, each strategy, as [sync] sections.

A way takes over from the job what the job says of that way (the period, the bits, the servers), and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from meshwright.job.job import Job
from meshwright.job.server_keys import ServerKeys
from meshwright.job.sync_keys import KEYS_OF, REPLICA_STRATEGIES, STRATEGY_KEYS, Compression
from meshwright.job.sync_section import TWO_LEVEL_ALGORITHMS, UNCHUNKED, SyncSection

_WARMUP_PART = 5
"""1-bit Adam needs whole gradients first; the paper's are about a fifth of the run."""


class Way(NamedTuple):
    """One way to synchronise."""

    name: str
    sync: SyncSection
    is_jobs: bool = False
    """The job's own."""

    @property
    def settings(self) -> tuple[str, ...]:
        """What ``--set`` would say."""
        return tuple(f"sync.{key}={_text(value)}" for key, value in self.sync.model_dump(exclude_unset=True).items())


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def ways(job: Job, node_size: int, algorithms: Mapping[str, str]) -> Iterator[Way]:
    """Every way, the job's own first where it is none of them.

    Args:
        job: resolved.
        node_size: ranks of a node, for what must know them.
        algorithms: of all-reduces: what it is called, and ``sync.algorithm``.
    """
    found = [*_all_reduces(job, node_size, algorithms), *_compressions(job, node_size), *_strategies(job)]
    own = [index for index, way in enumerate(found) if way.sync == job.sync]
    if own:
        found[own[0]] = found[own[0]]._replace(is_jobs=True)
    else:
        yield Way(f"the job's own ({_own(job.sync)})", job.sync, True)
    yield from found


def _own(sync: SyncSection) -> str:
    if sync.strategy != "all-reduce":
        return sync.strategy
    return f"all-reduce, {sync.algorithm}" if sync.compression == "none" else sync.compression


def _section(job: Job, values: Mapping[str, Any], keys: tuple[str, ...] = ()) -> SyncSection:
    given = job.sync.model_fields_set
    kept = {key: getattr(job.sync, key) for key in (*keys, "bucket_bytes") if key in given}
    return SyncSection.model_validate({**kept, **values})


def _all_reduces(job: Job, node_size: int, algorithms: Mapping[str, str]) -> Iterator[Way]:
    for name, algorithm in algorithms.items():
        values: dict[str, Any] = {} if algorithm == "auto" else {"algorithm": algorithm}
        keys = () if algorithm in UNCHUNKED else ("chunk_bytes",)
        if algorithm in TWO_LEVEL_ALGORITHMS:
            values["node_size"] = node_size
        yield Way(name, _section(job, values, keys))


def _compressions(job: Job, node_size: int) -> Iterator[Way]:
    for kind in get_args(Compression):
        if kind == "none":
            continue
        values: dict[str, Any] = {"compression": kind}
        keys = tuple(key for key, kinds in KEYS_OF.items() if kind in kinds)
        if job.sync.strategy not in REPLICA_STRATEGIES:
            keys = (*keys, "compression_warmup_steps")
        if kind == "one-bit-adam" and not job.sync.compression_warmup_steps:
            values["compression_warmup_steps"] = max(1, job.train.steps // _WARMUP_PART)
        section = _section(job, values, keys)
        yield Way(f"powersgd rank {section.compression_rank}" if kind == "powersgd" else kind, section)
    layout = job.layout
    slow: dict[str, Any] = {"compression": "int8", "compression_level": "slow"}
    if layout.zero == 0:
        slow["node_size"] = node_size
    yield Way("int8 between nodes alone", _section(job, slow, ("compression_block",)))


def _strategies(job: Job) -> Iterator[Way]:
    stated = "" if "period" in job.sync.model_fields_set else " (default)"
    meeting = (("local", None), ("easgd", None), ("diloco", None), ("diloco", "int8"), ("diloco", "dgc"))
    for name, compression in meeting:
        values: dict[str, Any] = {"strategy": name} | ({"compression": compression} if compression else {})
        section = _section(job, values, tuple(key for key, names in STRATEGY_KEYS.items() if name in names))
        yield Way(f"{name}{f' {compression}' if compression else ''}, period {section.period}{stated}", section)
    server = _section(job, {"strategy": "server"}, tuple(ServerKeys.model_fields))
    yield Way(f"server, {server.server_mode}", server)
