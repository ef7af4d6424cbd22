"""Ways to synchronise side by side under one layout: seconds, bytes on the slowest link, memory, and whether it is the
same update.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from meshwright.errors import InputError
from meshwright.job.cluster import ClusterSpec
from meshwright.job.job import Job
from meshwright.job.sync_section import TWO_LEVEL_ALGORITHMS, SyncSection
from meshwright.plan.arrays import Work, from_layouts
from meshwright.plan.confirm import exact_peak
from meshwright.plan.evaluate import evaluate, rules_of
from meshwright.plan.exchange import CHOICES
from meshwright.plan.machines import cluster_of, without_budget
from meshwright.plan.planner import check_plannable, cluster_words, evaluated
from meshwright.plan.predict import predict
from meshwright.plan.sync_bytes import crosses_nodes, link_bytes
from meshwright.plan.sync_legs import SyncTerms
from meshwright.plan.sync_ways import Way, ways
from meshwright.plan.sync_words import LOSSES, same_update

_QUICKER = 0.99
"""Algorithms that take less of the direct exchange's time than this are worth a row."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Synchronised(_Part):
    """One way."""

    way: str
    settings: tuple[str, ...]
    """For ``--set``."""
    is_jobs: bool
    """The job's own."""
    step_time_s: float
    """Of a steady step; between meetings and at them, in the mean."""
    warmup_step_time_s: float | None
    link_bytes: float
    """Sent by one rank in a step over ``SyncComparison.link``; the mean over a node's ranks and a period's steps."""
    memory_added_bytes: int
    """At the peak of the fullest rank, over plain sums."""
    fits: bool
    same_update: bool
    """That of one device: an exact sum in every step. Otherwise another algorithm."""


class Refused(_Part):
    """A way that does not combine with the job."""

    way: str
    reason: str
    """One sentence."""


class SyncComparison(_Part):
    """The whole answer."""

    layout: str
    cluster: str
    link: Literal["between nodes", "inside a node"]
    """The slowest link that data parallel ranks cross."""
    ways: tuple[Synchronised, ...]
    """Fastest first."""
    refused: tuple[Refused, ...]
    slower_algorithms: tuple[str, ...]
    """All-reduces that are not quicker than the direct one here."""
    losses: str = LOSSES


def compare_sync(job: Job, cluster: ClusterSpec | str | None = None) -> SyncComparison:
    """The ways that are legal for the job and its layout.

    Args:
        job: with a layout.
        cluster: as of ``plan``.

    Raises:
        InputError: the layout is illegal or has one data parallel rank, or as ``plan_layout``.
    """
    machines = cluster_of(job, cluster, job.layout.ranks)
    check_plannable(job)
    plain = _with_sync(without_budget(job), SyncSection())
    terms = SyncTerms.of(Work.of(plain), machines, rules_of(Work.of(plain)))
    if not terms.cpu and job.cluster.device == "auto":  # what this cluster is, for rules that ask
        plain = plain.model_copy(update={"cluster": plain.cluster.model_copy(update={"device": "cuda"})})
    base = plain.resolve(purpose="plan")
    if base.layout.dp == 1:
        raise InputError("layout: dp=1 has nothing to synchronise; use dp of at least 2")
    columns = from_layouts([base.layout], Work.of(base))
    far = crosses_nodes(Work.of(base), machines, columns)
    algorithms, slower, fastest = _algorithms(base, machines, terms, far)
    asked = _with_sync(job, _settled(job.sync, terms, fastest, machines.devices_per_node))
    memory = exact_peak(base, base.layout).peak
    found, refused = [], []
    for way in ways(asked, machines.devices_per_node, algorithms):
        try:
            changed = _with_sync(plain, way.sync).resolve(purpose="plan")
        except InputError as error:
            refused.append(Refused(way=way.name, reason=str(error).split("\n")[0]))
            continue
        found.append(_one(changed, machines, way, memory, far))
    return SyncComparison(
        layout=str(base.layout),
        cluster=cluster_words(machines),
        link="between nodes" if far else "inside a node",
        ways=tuple(sorted(found, key=lambda one: one.step_time_s)),
        refused=tuple(refused),
        slower_algorithms=slower,
    )


def _with_sync(job: Job, sync: SyncSection) -> Job:
    return job.model_copy(update={"sync": sync})


def _algorithms(
    job: Job, cluster: ClusterSpec, terms: SyncTerms, far: bool
) -> tuple[dict[str, str], tuple[str, ...], str]:
    """All-reduces worth a row, by what they are called; the others; and the fastest.

    Inside a node, and where NCCL chooses, there is one.
    """
    if not terms.cpu:
        return {"all-reduce": "auto"}, (), "auto"
    first = {"all-reduce, direct": "direct" if terms.chooses else "auto"}
    if not far:
        return first, (), "direct"
    times = {}
    for name in CHOICES:
        work = Work.of(_with_sync(job, _by(name, cluster.devices_per_node)))
        times[name] = float(evaluate(work, cluster, from_layouts([job.layout], work)).step_time[0])
    quick = [name for name in CHOICES[1:] if times[name] < _QUICKER * times["direct"]]
    others = tuple(name for name in CHOICES[1:] if name not in quick)
    return first | {f"all-reduce, {name}": name for name in quick}, others, min(times, key=lambda name: times[name])


def _by(name: str, node_size: int) -> SyncSection:
    return SyncSection.model_validate(
        {"algorithm": name, **({"node_size": node_size} if name in TWO_LEVEL_ALGORITHMS else {})}
    )


def _settled(sync: SyncSection, terms: SyncTerms, fastest: str, node_size: int) -> SyncSection:
    """The job's own section, with the algorithm that training takes where it chooses."""
    if not terms.chooses or sync.strategy != "all-reduce" or sync.compression != "none" or sync.algorithm != "auto":
        return sync
    chosen = _by(fastest, node_size)
    return sync.model_copy(update={"algorithm": chosen.algorithm, "node_size": chosen.node_size})


def _one(job: Job, cluster: ClusterSpec, way: Way, memory: int, far: bool) -> Synchronised:
    entry = evaluated(job, cluster)
    work = Work.of(job)
    inside, outside = link_bytes(work, cluster, from_layouts([job.layout], work))
    added = entry.peak_memory_bytes - memory
    if job.sync.strategy == "server":  # which hold what the ledger of ranks has as optimizer state
        added = -predict(job, [0]).ranks[0].stores.optimizer
    return Synchronised(
        way=way.name,
        settings=way.settings,
        is_jobs=way.is_jobs,
        step_time_s=entry.step_time_s,
        warmup_step_time_s=entry.warmup_step_time_s,
        link_bytes=float((outside if far else inside)[0]),
        memory_added_bytes=added,
        fits=entry.fits,
        same_update=same_update(job.sync),
    )
