"""The keys of [sync] that say how a parameter server works."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from meshwright.job.sections import Section

MOST_SERVER_PROCESSES = 64
"""Of a run: each is a process of this machine, with a copy of the program."""


class ServerKeys(Section):
    """[sync] with ``strategy = "server"``."""

    servers: PositiveInt = 1
    """``server``: shards of the parameters, each owned by a server process (or several, ``server_replicas``)."""
    server_replicas: Annotated[int, Field(ge=1, le=8)] = 1
    """``server``: processes that hold the same shard, as a chain; training outlives all but one of each. At most 64
    processes in all (servers x server_replicas)."""
    server_mode: Literal["synchronous", "asynchronous", "stale-synchronous"] = "synchronous"
    """``server``: an update when all workers have pushed; at every push; or all have, but workers may run ahead."""
    staleness_bound: NonNegativeInt | None = None
    """``stale-synchronous``: how many steps a worker may be ahead of the slowest."""
    backup_workers: NonNegativeInt = 0
    """``server``, synchronous: an update is made of the first dp minus this many pushes, later ones are dropped."""
    stale_rate: Literal["none", "inverse", "inverse-root"] = "none"
    """``asynchronous``: factor on the learning rate for staleness s: 1, 1 / max(1, s) or 1 / sqrt(1 + s)."""
    server_placement: Literal["size", "hash"] = "size"
    """``server``: which server owns what: balanced by size, or consistent hashing, which moves least when it grows."""
    server_host: str = "127.0.0.1"
    """``server``: the address that the coordinator and the servers listen on; loopback unless told."""
    server_port: PositiveInt | None = None
    """``server``: the coordinator's port; absent: a free one."""
    server_timeout: Annotated[float, Field(ge=0.5, le=86400, allow_inf_nan=False)] = 10.0
    """``server``: seconds without a sign of life after which a worker's samples go to others, and a replica is out."""
    server_restarts: NonNegativeInt = 3
    """``server``: how many processes that died are started again, over the whole run."""
    workers_elsewhere: NonNegativeInt = 0
    """``server``: how many of the dp workers (the last) are started by hand on other machines; training waits."""
