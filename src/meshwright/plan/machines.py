"""Which machines a job is planned for: the cluster it names, cut to its ranks and its memory budget."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.job.cluster import ClusterSpec, load_cluster
from meshwright.job.job import Job


def cluster_of(job: Job, given: str | ClusterSpec | None = None, ranks: int | None = None) -> ClusterSpec:
    """The cluster that ``job`` is planned for; its device has the memory that a rank may use.

    That is ``cluster.memory_per_rank_bytes``, or the device's less a reserve.

    Args:
        job: its ``cluster.machines``, ``cluster.ranks`` and ``cluster.memory_per_rank_bytes`` count.
        given: replaces ``cluster.machines``.
        ranks: how many devices to use; absent: ``cluster.ranks``, or all.

    Raises:
        InputError: nothing says which machines, or they are fewer than the ranks.
    """
    source = given if given is not None else job.cluster.machines
    if source is None:
        raise InputError(
            'cluster: nothing says which machines to plan for; give --cluster "512x8 A100-SXM4-80GB" (nodes x devices, '
            "a name of the catalogue), or measure this machine with `meshwright calibrate --out cluster.json` and give "
            '--cluster cluster.json, or [cluster] machines = "cluster.json" in the job'
        )
    cluster = load_cluster(source) if isinstance(source, str) else source
    wanted = ranks if ranks is not None else job.cluster.ranks
    if wanted is not None:
        cluster = with_devices(cluster, wanted)
    budget = job.cluster.memory_per_rank_bytes
    return _without_reserve(cluster) if budget is None else _with_memory(cluster, budget)


def without_budget(job: Job) -> Job:
    """The same job without a memory budget, so that layouts beyond it can be described, too."""
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"memory_per_rank_bytes": None})})


def with_devices(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """The same cluster with only ``devices`` of its devices: whole nodes, or part of one.

    Raises:
        InputError: it has not so many, or they fill no whole number of nodes.
    """
    node = cluster.devices_per_node
    if devices > cluster.devices:
        raise InputError(
            f"cluster: {devices} ranks are more than the {cluster.devices} devices of {cluster.name or 'the cluster'}; "
            f"use 1 to {cluster.devices}"
        )
    if devices < node:
        return cluster.model_copy(update={"nodes": 1, "devices_per_node": devices})
    if devices % node:
        raise InputError(
            f"cluster: {devices} ranks fill no whole number of nodes of {node} devices; "
            f"use fewer than {node}, or a multiple of it"
        )
    return cluster.model_copy(update={"nodes": devices // node})


def one_rank_a_core(cluster: ClusterSpec) -> ClusterSpec:
    """The same cluster with no more ranks a node than cores, where ranks share processor cores.

    More of them only take turns; a calibration knows what that costs, but nobody wants it unasked.
    """
    if cluster.host is None or cluster.host.cores >= cluster.devices_per_node:
        return cluster
    return cluster.model_copy(update={"devices_per_node": cluster.host.cores})


_RUNTIME_BYTES = 1 << 30
"""Of an accelerator: its context and the communicators' buffers, which no ledger counts."""
_FRAGMENTS = 0.02
"""Part of an accelerator's memory that the allocator cannot use."""
_SYSTEM = 0.05
"""Part of a machine's memory that the system and the interpreters take, where ranks are processes."""


def _without_reserve(cluster: ClusterSpec) -> ClusterSpec:
    """The same cluster with only the memory that a rank's peak may take."""
    memory = cluster.device.memory_bytes
    if cluster.host is None:
        usable = round(memory * (1 - _FRAGMENTS)) - _RUNTIME_BYTES
        note = f"memory: of each device's {memory:,} bytes {_FRAGMENTS:.0%} and 1 GiB are left to fragments and runtime"
    else:
        usable = round(memory * (1 - _SYSTEM))
        note = f"memory: of each rank's {memory:,} bytes {_SYSTEM:.0%} are left to the system"
    return _with_memory(cluster, max(usable, 1)).model_copy(update={"basis": (*cluster.basis, note)})


def _with_memory(cluster: ClusterSpec, memory: int) -> ClusterSpec:
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"memory_bytes": memory})})
