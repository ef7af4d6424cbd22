"""``meshwright plan --compare-sync``: the ways to synchronise one layout, side by side."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console

from meshwright.cli.plan_show import seconds, short, size
from meshwright.errors import InputError
from meshwright.job.job import Job

if TYPE_CHECKING:
    from meshwright.plan.sync_compare import SyncComparison, Synchronised


def compare_ways(job: Job, cluster: str | None, console: Console, as_json: bool) -> None:
    """Print the comparison.

    Raises:
        InputError: the job has no layout of its own.
    """
    from meshwright.plan.sync_compare import compare_sync

    if job.auto:
        raise InputError(
            "--compare-sync: ways to synchronise are compared under one layout, but layout is auto; give one, for "
            'example --layout "dp=4"'
        )
    found = compare_sync(job, cluster)
    if as_json:
        print(json.dumps(found.model_dump()))
    else:
        show_ways(console, found)


def show_ways(console: Console, found: SyncComparison) -> None:
    """One line a way, then why not the others."""
    lines = [
        f"{short(found.layout)} on {found.cluster}: ways to synchronise, predicted, fastest first; "
        f"bytes of one rank and step {found.link}",
        f"{'way':<34} {'step':>8} {'bytes':>9} {'memory':>10}  update",
        *(_line(one) for one in found.ways),
    ]
    warm = [one for one in found.ways if one.warmup_step_time_s is not None]
    lines += [f"warm-up of {one.way}: {seconds(one.warmup_step_time_s or 0.0)} a step" for one in warm]
    if any(one.is_jobs for one in found.ways):
        lines.append("* the job's own")
    if found.slower_algorithms:
        lines.append(f"not quicker than the direct exchange here: {', '.join(found.slower_algorithms)}")
    if found.refused:
        lines += ["not with this job and layout:", *(f"  {one.way}: {one.reason}" for one in found.refused)]
    for line in [*lines, found.losses]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _line(one: Synchronised) -> str:
    sign = "-" if one.memory_added_bytes < 0 else "+"
    added = f"{sign}{size(abs(one.memory_added_bytes))}" if one.memory_added_bytes else "0"
    update = "same update" if one.same_update else "other algorithm"
    fits = "" if one.fits else "; does not fit"
    name = f"{one.way}{' *' if one.is_jobs else ''}"
    return f"{name:<34} {seconds(one.step_time_s):>8} {size(one.link_bytes):>9} {added:>10}  {update}{fits}"
