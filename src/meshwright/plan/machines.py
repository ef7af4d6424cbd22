"""Which machines a job is planned for: the cluster it names, cut to its ranks and its memory budget."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.job.cluster import ClusterSpec, load_cluster
from meshwright.job.job import Job


def cluster_of(job: Job, given: str | ClusterSpec | None = None, ranks: int | None = None) -> ClusterSpec:
    """The cluster that ``job`` is planned for.

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
    if budget is not None and budget < cluster.device.memory_bytes:
        cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"memory_bytes": budget})})
    return cluster


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


def usable_memory(cluster: ClusterSpec) -> int:
    """Bytes a rank's peak may take of a device's memory."""
    return cluster.device.memory_bytes
