"""Whether somebody else already started us as one rank of several, and which rank that makes us."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.errors import InputError


class Begin(NamedTuple):
    """How a run begins, which its first rank finds out for all."""

    resume: bool
    """From its last checkpoint."""
    restart: bool
    """After a failure: what it recorded beyond where it goes on from is forgotten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Our place among ranks that a cluster's own launcher started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    source: str
    """Who started us, in words, for messages: ``"torchrun"``, ``"srun"``."""

    def export(self, environment: MutableMapping[str, str] | None = None) -> None:
        """Write the place under torch's names, so that ``init_process_group("...")`` finds it."""
        environment = os.environ if environment is None else environment
        environment.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.master_address,
            MASTER_PORT=str(self.master_port),
        )


def detect_environment(environment: Mapping[str, str] | None = None) -> RankPlace | None:
    """Our place if torchrun, ``srun`` or a Kubernetes Job started us; ``None`` if we are to start our own ranks.

    Looked at in this order: torch's names (``RANK``, ``WORLD_SIZE``; what torchrun and the Kubeflow operators set),
    a Slurm step of more than one task, an indexed Kubernetes Job with ``WORLD_SIZE`` and ``MASTER_ADDR``.

    Raises:
        InputError: the variables are there but incomplete or contradict each other.
    """
    environment = os.environ if environment is None else environment
    if "RANK" in environment or ("WORLD_SIZE" in environment and "JOB_COMPLETION_INDEX" not in environment):
        return _from_torch(environment)
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _from_slurm(environment)
    if "JOB_COMPLETION_INDEX" in environment and "WORLD_SIZE" in environment:
        return _from_torch(
            {**environment, "RANK": environment["JOB_COMPLETION_INDEX"]}, source="the Kubernetes Job"
        )
    return None


def restarted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun has started its ranks before this time, and some failed."""
    environment = os.environ if environment is None else environment
    return _number(environment, "TORCHELASTIC_RESTART_COUNT", 0) > 0


def _from_torch(environment: Mapping[str, str], source: str = "") -> RankPlace:
    source = source or ("torchrun" if "TORCHELASTIC_RUN_ID" in environment else "the launcher (RANK, WORLD_SIZE)")
    return _checked(
        rank=_number(environment, "RANK"),
        world_size=_number(environment, "WORLD_SIZE"),
        # One rank a host unless said otherwise: that is how operators without torchrun start them.
        local_rank=_number(environment, "LOCAL_RANK", 0),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", 1),
        master_address=environment.get("MASTER_ADDR", ""),
        master_port=_number(environment, "MASTER_PORT", 29500),
        source=source,
    )


def _from_slurm(environment: Mapping[str, str]) -> RankPlace | None:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    world_size = _number(environment, tasks, 1)
    if world_size == 1:  # `srun --pty bash`, or one task that is to start its own ranks
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job, step = _number(environment, "SLURM_JOB_ID", 0), _number(environment, "SLURM_STEP_ID")
    return _checked(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_world_size=_slurm_local_tasks(environment),
        master_address=environment.get("MASTER_ADDR") or first_slurm_host(nodes),
        # Every task must come to the same port without talking: from the job and step, below the ephemeral range.
        master_port=_number(environment, "MASTER_PORT", 10000 + (7 * job + step) % 20000),
        source="srun",
    )


def first_slurm_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[003-006,9]`` gives ``gpu003``."""
    depth = 0
    for position, character in enumerate(nodes):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            nodes = nodes[:position]
            break
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes)


def _slurm_local_tasks(environment: Mapping[str, str]) -> int:
    """Tasks on this node, from the run-length form ``4(x2),3`` of the tasks on every node."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or "1"
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise InputError(f"SLURM_TASKS_PER_NODE={text!r} is not a list such as '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(_number(environment, "SLURM_NODEID", 0), len(counts) - 1)]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise InputError(f"{name} is not set although other rank variables are; set it, or unset them all")
        return default
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name}={text!r} is not a whole number") from None


def _checked(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    master_address: str,
    master_port: int,
    source: str,
) -> RankPlace:
    if world_size < 1:
        raise InputError(f"{source} gave world size {world_size}; it must be at least 1")
    if not 0 <= rank < world_size:
        raise InputError(f"{source} gave rank {rank} of world size {world_size}; legal are 0 to {world_size - 1}")
    if not 0 <= local_rank < local_world_size:
        raise InputError(
            f"{source} gave local rank {local_rank} of {local_world_size} on this host; "
            f"legal are 0 to {local_world_size - 1}"
        )
    if not master_address:
        raise InputError(f"{source} gave no MASTER_ADDR; set it to the host of rank 0")
    if not 0 < master_port < 65536:
        raise InputError(f"{source} gave MASTER_PORT={master_port}; legal are 1 to 65535")
    return RankPlace(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_address=master_address,
        master_port=master_port,
        source=source,
    )
