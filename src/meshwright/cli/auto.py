"""``layout = "auto"`` in a job: asked of the planner, with a bar while it searches and a line about its answer."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from meshwright.cli.plan import search_progress
from meshwright.cli.plan_show import seconds, short, size
from meshwright.job.job import Job
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
