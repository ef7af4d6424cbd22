"""The rules of [sync] strategy = "server" with the rest of a job, one sentence each."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from meshwright.job.fault_section import FaultSection
from meshwright.job.job import Job
from meshwright.job.recovery_section import RecoverySection
from meshwright.job.server_keys import ServerKeys

_UNREAD = {
    "recovery": (
        tuple(RecoverySection.model_fields),
        "sync.server_restarts, sync.server_timeout and sync.server_replicas say what happens when a process fails",
    ),
    "fault": (
        tuple(FaultSection.model_fields),
        "end or stop a server or a worker by a signal to its process, which events.jsonl names",
    ),
    "checkpoint": (
        ("incremental", "copy_to", "failure"),
        "their checkpoints are written whole, to the run directory alone, and one that cannot be ends the run",
    ),
    "observe": (
        ("tensorboard", "ledger_step"),
        "metrics.jsonl has their steps, and summary.json their bytes",
    ),
}
"""By section: keys that no server, worker or coordinator reads, and what is there instead."""


def server_problems(job: Job) -> Iterator[str]:
    """Everything that does not fit a parameter server, or is set without one."""
    if job.sync.strategy != "server":
        for key, value in job.sync.changed(*ServerKeys.model_fields).items():
            shown = '""' if value == "" else value
            yield (
                f"sync.{key}: {shown} is used by sync.strategy=server alone, but strategy is "
                f"{job.sync.strategy}; leave it out, or use strategy=server"
            )
        return
    yield from _layout_problems(job)
    yield from _mode_problems(job)
    yield from _other_problems(job)


def unread_by_servers(job: Job) -> Iterator[str]:
    """One sentence for each key outside of [sync] that training with servers would ignore."""
    if job.sync.strategy != "server":
        return
    for section, (keys, instead) in _UNREAD.items():
        for key, value in getattr(job, section).changed(*keys).items():
            yield f"{section}.{key}: {_shown(value)} is not used by sync.strategy=server; leave it out ({instead})"
    if job.layout.placement is not None:
        places = ",".join(map(str, job.layout.placement))
        yield f"layout: placement={places} is of ranks, which sync.strategy=server has not; leave it out"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(f'"{each}"' for each in value) if isinstance(value, tuple) else str(value)


def _layout_problems(job: Job) -> Iterator[str]:
    for name, one in (("tp", 1), ("pp", 1), ("zero", 0)):
        value = getattr(job.layout, name)
        if value != one:
            what = "the servers hold the state" if name == "zero" else "each worker computes the whole model"
            yield (
                f"layout: {name}={value} does not combine with sync.strategy=server, where {what}; use {name}={one} "
                f"(dp is the number of workers), or strategy=all-reduce"
            )


def _mode_problems(job: Job) -> Iterator[str]:
    sync, dp, size = job.sync, job.layout.dp, job.batch.global_size
    mode = sync.server_mode
    if mode == "stale-synchronous" and sync.staleness_bound is None:
        yield "sync.staleness_bound is missing, but server_mode is stale-synchronous; give 0 or more steps"
    if mode != "stale-synchronous" and sync.staleness_bound is not None:
        yield (
            f"sync.staleness_bound: {sync.staleness_bound} is used by server_mode=stale-synchronous alone, but it is "
            f"{mode}; leave it out, or use stale-synchronous"
        )
    if sync.backup_workers and mode != "synchronous":
        yield f"sync.backup_workers: {sync.backup_workers} needs server_mode=synchronous, but it is {mode}; use 0"
    elif sync.backup_workers >= dp:
        yield (
            f"sync.backup_workers: {sync.backup_workers} leaves none of the {dp} workers (dp); use 0 to {dp - 1}, "
            "or a larger dp"
        )
    elif sync.backup_workers and size % (dp - sync.backup_workers):
        yield (
            f"batch.global_size: {size} is not divided by the {dp - sync.backup_workers} pushes that make an update "
            f"(dp={dp} less backup_workers={sync.backup_workers}); use a multiple of it"
        )
    if mode == "asynchronous" and size % dp:
        yield (
            f"batch.global_size: {size} is not divided by the {dp} workers (dp), each of which takes an equal share "
            "of it in asynchronous mode; use a multiple of it"
        )
    if sync.stale_rate != "none" and mode != "asynchronous":
        yield f"sync.stale_rate: {sync.stale_rate} needs server_mode=asynchronous, but it is {mode}; use none"
    if job.train.deterministic and (mode != "synchronous" or sync.backup_workers):
        yield (
            "train.deterministic: true promises the same bits for every dp, but which pushes an update is made of "
            "depends on who is faster; use server_mode=synchronous without backup_workers, or deterministic=false"
        )


def _other_problems(job: Job) -> Iterator[str]:
    sync = job.sync
    if sync.algorithm != "auto":
        yield (
            f"sync.algorithm: {sync.algorithm} is of strategy=all-reduce; with strategy=server the servers add, in the "
            "order of the workers; leave it out"
        )
    if sync.compression != "none":
        yield (
            f"sync.compression: {sync.compression} is of sums between ranks; with strategy=server gradients travel "
            "whole; use compression=none, or strategy=all-reduce"
        )
    if job.precision.dtype == "float16":
        yield "precision.dtype: float16 needs a loss scale, which sync.strategy=server has not; use bfloat16"
    if job.cluster.device == "cuda":
        yield "cluster.device: cuda is not available with sync.strategy=server; use cpu"
    if sync.workers_elsewhere >= job.layout.dp:
        yield (
            f"sync.workers_elsewhere: {sync.workers_elsewhere} leaves none of the {job.layout.dp} workers (dp) to this "
            f"machine; use 0 to {job.layout.dp - 1}, or a larger dp"
        )
    if not _names_one_interface(sync.server_host):
        yield (
            f'sync.server_host: "{sync.server_host}" is no address that workers can reach; give that of one interface, '
            "or leave it out for 127.0.0.1"
        )
    if sync.server_placement != "size" and sync.servers == 1:
        yield (
            f"sync.server_placement: {sync.server_placement} says which of several servers owns what, but there is 1; "
            "leave it out, or use servers of at least 2"
        )
    if sync.server_port is not None and sync.server_port > 65535:
        yield f"sync.server_port: {sync.server_port} is no port; use 1 to 65535, or leave it out for a free one"
    if job.checkpoint.mode == "async":
        yield "checkpoint.mode: async is not available with sync.strategy=server; use sync"
    if job.checkpoint.interval is not None:
        yield (
            f"checkpoint.interval: {job.checkpoint.interval} is not available with sync.strategy=server; "
            "use every, in steps"
        )


def _names_one_interface(host: str) -> bool:
    """Whether sockets may take it for the address of one machine: not all of them, a group, or everybody."""
    if not host.strip() or host == "<broadcast>":
        return False
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    try:
        address = ipaddress.IPv4Address(socket.inet_aton(host))  # as listening reads it: "0" is 0.0.0.0
    except OSError:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return True  # a name
    return not (address.is_unspecified or address.is_multicast or address.is_reserved)
