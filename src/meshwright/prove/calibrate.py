"""``meshwright calibrate``: what this machine, or this cluster, really does, as a cluster file.

Four measurements, none of which is a layout that will be predicted:

1. kernels of one rank: matrix products, attention, streaming (``calibrate_kernels``);
2. the program's own costs: whole steps of small models on one core (``calibrate_program``);
3. how much slower a rank computes when others compute beside it;
4. the program's collectives (``calibrate_collectives``).

On one machine it starts ranks of its own; under torchrun, srun or a Kubernetes Job it takes their places.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from meshwright.comm.collectives import barrier
from meshwright.job.cluster import ClusterSpec
from meshwright.prove.calibrate_collectives import SIZES, CollectiveTime, groupings, measure_collectives
from meshwright.prove.calibrate_fit import Findings, cluster_of_findings
from meshwright.prove.calibrate_kernels import Kernels, measure_kernels
from meshwright.prove.calibrate_program import (
    SHAPES,
    SHARDED,
    SPLIT,
    Phases,
    Shape,
    Sharding,
    Split,
    measure_program,
    measure_sharding,
    measure_split,
    program_job,
    step_times,
)
from meshwright.prove.pool import RankPool
from meshwright.recovery.environment import RankPlace

Say = Callable[[str], None]

_KERNEL_SECONDS, _COLLECTIVE_SECONDS, _BESIDE_SECONDS = 4.0, 10.0, 1.2
_PROGRAM_ROUNDS = 6
_BESIDE = Shape(256, 2, 4, 768, 1024, 128, 1, 1)
"""The step that is timed alone and beside others."""


def calibrate(ranks: int, say: Say, *, effort: float = 1.0) -> ClusterSpec:
    """Measure this machine with processes of its own.

    Args:
        ranks: at most so many at once; there may be more than cores.
        say: told what is being measured.
        effort: scales how long it takes; 1 is under a minute.
    """
    kernels, program, sharding, split = _on_this_machine(say, effort, ranks)
    say(f"computing beside others: 1 to {ranks} ranks on {_cores()} cores")
    contention = measure_contention(ranks, _BESIDE_SECONDS * effort)
    collectives: list[CollectiveTime] = []
    if ranks > 1:
        wanted = groupings(ranks, ranks)
        say(f"collectives: {len(wanted)} groupings of up to {ranks} ranks, {len(SIZES)} sizes")
        pool = RankPool(ranks)
        try:
            seconds = _COLLECTIVE_SECONDS * effort
            collectives = pool.run(measure_collectives, wanted, SIZES, seconds, timeout=600.0)[0]
        finally:
            pool.close()
    return cluster_of_findings(
        Findings(
            kernels, program, sharding, split, contention, collectives, nodes=1, devices_per_node=ranks, cores=_cores(),
            memory_bytes=psutil.virtual_memory().total // ranks, device=processor_name(), cuda=False,
            note=_note(),
        )
    )  # fmt: skip


def calibrate_as_rank(place: RankPlace, say: Say, *, effort: float = 1.0, cuda: bool = False) -> ClusterSpec | None:
    """The same with ranks that somebody else started, over as many hosts as they are on.

    The default process group must be up; every rank must call it. The first rank measures its host while the others
    wait, then all of them measure collectives.

    Returns:
        The cluster file on the first rank, None on the others.
    """
    world = dist.group.WORLD
    assert world is not None
    device_type = "cuda" if cuda else "cpu"
    kernels, contention = None, {1: 1.0}
    program: list[Phases] = []
    sharding: list[Sharding] = []
    split: list[Split] = []
    if cuda:
        kernels = measure_kernels(_KERNEL_SECONDS * effort, cuda=True)
    elif place.rank == 0:
        with _without_launcher():
            kernels, program, sharding, split = _on_this_machine(say, effort, place.local_world_size)
            say(f"computing beside others: 1 to {place.local_world_size} ranks on {_cores()} cores")
            contention = measure_contention(place.local_world_size, _BESIDE_SECONDS * effort)
    barrier(world)
    wanted = groupings(place.world_size, place.local_world_size)
    say(f"collectives: {len(wanted)} groupings of up to {place.world_size} ranks, {len(SIZES)} sizes")
    collectives = measure_collectives(wanted, SIZES, _COLLECTIVE_SECONDS * effort, device_type)
    if place.rank != 0 or kernels is None:
        return None
    memory = psutil.virtual_memory().total // place.local_world_size
    return cluster_of_findings(
        Findings(
            kernels, program, sharding, split, contention, collectives,
            nodes=max(1, place.world_size // place.local_world_size), devices_per_node=place.local_world_size,
            cores=_cores(), memory_bytes=torch.cuda.mem_get_info()[1] if cuda else memory,
            device=torch.cuda.get_device_name() if cuda else processor_name(), cuda=cuda, note=_note(),
        )
    )  # fmt: skip


@contextmanager
def _without_launcher() -> Iterator[None]:
    """Without torchrun's variables, which would send the processes of a pool to its store."""
    names = [name for name in os.environ if name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))]
    kept = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(kept)


def _on_this_machine(say: Say, effort: float, ranks: int) -> tuple[Kernels, list[Phases], list[Sharding], list[Split]]:
    """With one process; and with two, what sharding and splitting matrices add."""
    rounds = max(3, round(_PROGRAM_ROUNDS * effort))
    pool = RankPool(1)
    try:
        say("one rank alone: matrix products, attention, streaming")
        kernels: Kernels = pool.run(measure_kernels, _KERNEL_SECONDS * effort, timeout=300.0)[0]
        say(f"one rank alone: training steps of {len(SHAPES)} small models")
        program: list[Phases] = pool.run(measure_program, SHAPES, rounds, timeout=600.0)[0]
    finally:
        pool.close()
    if ranks == 1:
        return kernels, program, [], []
    say("two ranks: what sharding parameters and splitting matrices add to a step")
    pool = RankPool(2)
    try:
        few = max(2, rounds // 3)
        sharding: list[Sharding] = pool.run(measure_sharding, SHARDED, few, timeout=600.0)[0]
        split: list[Split] = pool.run(measure_split, SPLIT, few, timeout=600.0)[0]
    finally:
        pool.close()
    return kernels, program, sharding, split


def measure_contention(ranks: int, seconds: float) -> dict[int, float]:
    """By number of ranks that compute at once: how many times longer a step takes each of them than one alone.

    Interleaved: all numbers twice over, medians of all ranks' steps.
    """
    pools = [RankPool(1) for _ in range(ranks)]
    times: dict[int, list[float]] = {count: [] for count in range(1, ranks + 1)}
    try:
        with ThreadPoolExecutor(ranks) as threads:
            list(threads.map(lambda pool: pool.run(step_for, 0.0, timeout=600.0), pools))  # start them all
            for _ in range(3):
                for count in times:
                    replies = threads.map(lambda pool: pool.run(step_for, seconds / 3, timeout=600.0), pools[:count])
                    times[count] += [step for reply in replies for step in reply[0]]
    finally:
        for pool in pools:
            pool.close()
    medians = {count: statistics.median(steps) for count, steps in times.items()}
    slower = {count: medians[count] / medians[1] for count in medians}
    # More ranks never make a rank faster; a smaller number is noise.
    return {count: max(slower[other] for other in slower if other <= count) for count in slower}


def step_for(seconds: float) -> list[float]:
    """Runs on a rank that is alone in its group: seconds of each step until the time is over."""
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while not times or time.perf_counter() < deadline:
        times += step_times(program_job(_BESIDE), 12 if seconds else 1)
    return times


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def processor_name() -> str:
    """As the kernel calls it."""
    lines: Sequence[str] = ()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _note() -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"measured {when}, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}"
