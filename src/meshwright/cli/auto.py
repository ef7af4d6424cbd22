"""``layout = "auto"`` in a job: asked of the planner, with a bar while it searches and a line about its answer."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from meshwright.cli.plan import search_progress
from meshwright.cli.plan_show import seconds, short, size
from meshwright.errors import InputError
from meshwright.job.cluster import load_cluster
from meshwright.job.job import Job
from meshwright.job.validate_sync import sync_problems
from meshwright.recovery.environment import RankPlace
from meshwright.verbs import Planned, with_planned_layout


def settled_layout(job: Job, place: RankPlace | None, resumed: Path | None, quiet: bool) -> Planned:
    """The job with a layout, and the plan where the layout was "auto".

    Args:
        job: as it was read.
        place: this process's place, where a launcher started it.
        resumed: the run directory that goes on, whose layout then stays.
        quiet: no bar and no line.
    """
    if not job.auto:
        return Planned(job)
    quiet = quiet or (place is not None and place.rank != 0)
    console = Console(file=sys.stderr, quiet=quiet, highlight=False, soft_wrap=True)
    with search_progress(quiet) as report:
        planned = with_planned_layout(
            job,
            ranks=None if place is None else place.world_size,
            launched_by=None if place is None else place.source,
            run=resumed,
            progress=report,
            say=lambda text: console.print(text, markup=False),
        )
    if planned.plan is not None:
        best = planned.plan.layouts[0]
        console.print(
            f"planned {short(best.layout)}: {seconds(best.step_time_s)} a step, {size(best.peak_memory_bytes)} on the "
            f"fullest rank, predicted; the fastest of {planned.plan.searched:,} layouts"
        )
    return planned


def settled_sync(job: Job, quiet: bool) -> Job:
    """The job with the planner's all-reduce algorithm and bucket size where those are "auto".

    Only machines that were measured as such have links that say anything about CPU ranks; without them the sum stays
    direct, and buckets those of [memory].

    Args:
        job: resolved.
        quiet: no line about it.

    Raises:
        InputError: buckets are to go by links of which nothing is known.
    """
    sync = job.sync
    wanted = sync.algorithm == "auto" or sync.bucket_bytes == "auto"
    if not wanted or job.layout.dp == 1 or sync.strategy != "all-reduce":
        return job
    cluster = None if job.cluster.machines is None else load_cluster(job.cluster.machines)
    if cluster is None or cluster.host is None:
        if sync.bucket_bytes == "auto":
            raise InputError(
                "sync.bucket_bytes: auto goes by measured links, which cluster.machines="
                f"{job.cluster.machines or 'none'} has not; give a file of `meshwright calibrate`, or a number of bytes"
            )
        return job
    from meshwright.plan.sync_choice import choose

    found, changed, said = choose(job, cluster), job, []
    if sync.bucket_bytes == "auto":
        changed = _with_sync(changed, bucket_bytes=found.bucket_bytes)
        said.append(f"sync.bucket_bytes={found.bucket_bytes}")
    if sync.algorithm == "auto" and found.algorithm != "direct":
        other = _with_sync(changed, algorithm=found.algorithm, node_size=found.node_size)
        if not list(sync_problems(other)):  # what another key of [sync] asks for comes first
            changed = other
            quick, direct = found.seconds[found.algorithm], found.seconds["direct"]
            said.append(f"sync.algorithm={found.algorithm} ({seconds(quick)} a bucket; direct {seconds(direct)})")
    if said:
        console = Console(file=sys.stderr, quiet=quiet, highlight=False, soft_wrap=True)
        console.print(f"planned {', '.join(said)}, predicted")
    return changed


def _with_sync(job: Job, **values: object) -> Job:
    return job.model_copy(update={"sync": job.sync.model_copy(update=values)})
