"""The verbs as Python functions: ``meshwright.plan(job)``, ``meshwright.train(job, out)``, ``meshwright.check(job)``.

Each does what the command of its name does, without a terminal: it takes a job (read already, or the path of its
file) and returns a value. A job that says ``layout = "auto"`` is given the planner's layout here; the rooms below
only ever see a resolved one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError
from meshwright.files import replace_text
from meshwright.job.job import Job, load_job, run_job

if TYPE_CHECKING:
    from meshwright.job.cluster import ClusterSpec
    from meshwright.job.layout import Layout
    from meshwright.plan.answer import Plan
    from meshwright.plan.search import Progress
    from meshwright.prove.parity import Parity

JobLike = Job | str | Path
PLAN_FILE = "plan.json"
"""In a run directory: the plan that chose its layout."""
CLUSTER_FILE = "cluster.json"
"""Beside it: the machines, where they were measured for it."""
_QUICK = 0.2
"""How much of a calibration's time a job without a cluster file gets."""


def plan(
    job: JobLike,
    cluster: ClusterSpec | str | None = None,
    *,
    ranks: int | None = None,
    top: int = 10,
    delayed: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest layout that fits, its runners-up, and why the others were rejected.

    Args:
        job: what is trained; its own layout does not matter.
        cluster: on what: ``"512x8 A100-SXM4-80GB"``, a cluster file, or read already; absent: ``[cluster] machines``.
        ranks: how many devices to use; absent: ``[cluster] ranks``, or all.
        top: how many layouts to answer with.
        delayed: try ``schedule=2bw`` too, which takes each gradient one update late.
        progress: told after each family: families done, families in all, layouts evaluated.

    Raises:
        InputError: the model cannot be planned, or nothing says which machines there are.
    """
    from meshwright.plan.planner import plan as make_plan

    return make_plan(_read(job), cluster, ranks=ranks, top=top, delayed=delayed, progress=progress)


def train(
    job: JobLike, out: str | Path, *, layout: str | None = None, resume: bool = False, from_step: int | None = None,
    port: int | None = None, quiet: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Train a model under the job's layout and return the run's summary, the content of ``summary.json``.

    It starts its own ranks on this machine. Under torchrun, srun or a Kubernetes Job use the command, which takes
    its place as one of their ranks.

    Args:
        job: what is trained.
        out: directory of the run; new or empty unless ``resume``.
        layout: replaces the job's layout; ``auto``: the planner's.
        resume: go on from the last checkpoint in ``out``.
        from_step: with ``resume``: from this checkpoint; later ones are put aside.
        port: rendezvous port on this machine; absent: a free one.
        quiet: print nothing.

    Raises:
        InputError: the job, the data or the directory are wrong; nothing was started.
        MeshwrightError: the work failed.
    """
    from meshwright.recovery.environment import detect_environment
    from meshwright.recovery.launch import check_port, launch
    from meshwright.train.prepare import prepare_run
    from meshwright.train.report import finish_report
    from meshwright.train.servers.run import check_servers, train_with_servers

    folder = Path(out)
    place = detect_environment()
    if place is not None:
        raise InputError(
            f"train: {place.source} started this process as one rank; use the command `meshwright train` there"
        )
    planned = with_planned_layout(_read(job, layout), run=folder if resume else None)
    check_port(port)  # before anything is written
    resolved = planned.job.resolve()
    if resolved.sync.strategy == "server":
        check_servers(resolved)
    with prepare_run(resolved, folder, resume=resume, from_step=from_step):
        planned.write(folder)
        if resolved.sync.strategy == "server":
            train_with_servers(resolved, folder, resume=resume, quiet=quiet)
        else:
            words = [*(["--resume"] if resume else []), *(["--quiet"] if quiet else [])]
            launch(folder, resolved, words, port=port, replan=for_fewer_ranks)
    return finish_report(resolved, folder, quiet=quiet)


def check(job: JobLike, layout: str | None = None, *, steps: int = 10, overrides: Sequence[str] = ()) -> Parity:
    """Prove that the job's layout changes nothing: some steps under it and on one device, compared.

    Args:
        job: what is trained.
        layout: replaces the job's layout; ``auto``: the planner's.
        steps: how many to compare.
        overrides: ``section.key=value`` texts, for a job given by its path.

    Returns:
        The differences and the bounds they were held to; ``passed`` says whether all are within.

    Raises:
        InputError: the job is wrong.
    """
    from meshwright.prove.check import check_layout

    planned = with_planned_layout(_read(job, layout, overrides))
    return check_layout(planned.job.resolve(), steps=steps)


class Planned:
    """A job whose layout is settled, and where a plan settled it, that plan and the machines it was made for."""

    def __init__(self, job: Job, plan: Plan | None = None, measured: ClusterSpec | None = None) -> None:
        self.job, self.plan, self.measured = job, plan, measured

    def write(self, run: Path) -> None:
        """Leave the plan in a run directory, and the machines where they were measured for it."""
        if self.plan is not None:
            replace_text(run / PLAN_FILE, self.plan.to_json())
        if self.measured is not None:
            replace_text(run / CLUSTER_FILE, self.measured.model_dump_json(indent=1, exclude_none=True) + "\n")


def with_planned_layout(
    job: Job,
    cluster: ClusterSpec | str | None = None,
    *,
    ranks: int | None = None,
    launched_by: str | None = None,
    run: Path | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Planned:
    """The job itself, or where its layout is ``auto``, the job with the planner's first choice.

    A job that names no machines is planned for this one, which is measured first (some seconds).

    Args:
        job: as it was read.
        cluster: replaces ``[cluster] machines``.
        ranks: how many there are, where a launcher says so.
        launched_by: who started this process as one rank of several; then nothing is measured.
        run: a run that is resumed: its layout stays, whatever the planner would say today.
        progress: told how far the search is.
        say: told what is measured.

    Raises:
        InputError: nothing says which machines there are, or no layout fits them.
    """
    if not job.auto:
        return Planned(job)
    if run is not None and (run / "job.toml").exists():
        return Planned(_with_planned(job, run_job(run).layout, f"{run.name}/job.toml"))
    measured = None
    if cluster is None and job.cluster.machines is None and launched_by is None:
        cluster = measured = _measured_machine(job, say)
    found = plan(job, cluster, ranks=ranks, progress=progress)
    if not found.fits:
        raise InputError(f"layout: auto finds none that fits; {nothing_fits(found)}")
    from meshwright.job.layout_text import parse_layout

    return Planned(_with_planned(job, parse_layout(found.layouts[0].layout), "planned"), found, measured)


def _with_planned(job: Job, layout: Layout, source: str) -> Job:
    """The job under a layout that was left to the planner, without sizes of [sync] that were for other layouts."""
    from meshwright.job.validate_sync import unused_sizes

    planned = job.with_layout(layout, source)
    defaults = {key: type(job.sync).model_fields[key].default for key in unused_sizes(planned)}
    return planned.model_copy(update={"sync": job.sync.model_copy(update=defaults)})


def _measured_machine(job: Job, say: Callable[[str], None]) -> ClusterSpec | None:
    """This machine, measured in some seconds: as many ranks as the job wants, or one a core.

    None where it would train on CUDA devices, which ``meshwright calibrate`` measures under torchrun.
    """
    import torch

    if job.cluster.device == "cuda" or (job.cluster.device == "auto" and torch.cuda.is_available()):
        return None
    from meshwright.prove.calibrate import calibrate

    ranks = job.cluster.ranks or len(os.sched_getaffinity(0))
    say(f'layout = "auto" and no [cluster] machines: measuring this machine with {ranks} ranks')
    return calibrate(ranks, say, effort=_QUICK)


def nothing_fits(found: Plan) -> str:
    """The closest layout of a plan in which nothing fits, what it lacks, and on which rank."""
    if not found.layouts:
        return f"no layout is legal on {found.cluster}; see the rejected families"
    closest = found.layouts[0]
    family = next(
        (line for line in found.rejected if line.closest == closest.layout and line.lacks_bytes is not None), None
    )
    why = family.reason.removeprefix("memory: ") if family else f"rank {closest.fullest_rank} has too little memory"
    return f"the closest is {closest.layout}: {why}"


def for_fewer_ranks(job: Job, ranks: int) -> Job | None:
    """A resolved job on at most ``ranks`` ranks: the planner's choice where the job names its machines, or one nearby.

    None when no layout of the job fits them.
    """
    from meshwright.job.layout_text import parse_layout
    from meshwright.recovery.shrink import fewer_ranks

    nearby = fewer_ranks(job, ranks)
    # The planner's choice would not take its gradients one update late, where the run does.
    if nearby is None or job.cluster.machines is None or job.layout.delayed:
        return nearby
    try:
        # What of [sync] does not go with so few ranks nearby may not go with any layout of theirs.
        found = plan(job.model_copy(update={"sync": nearby.sync}), ranks=nearby.layout.ranks, top=1)
        if not found.fits:
            return nearby
        return nearby.with_layout(parse_layout(found.layouts[0].layout), source="planned").resolve()
    except InputError:  # those machines cannot be had in such a number
        return nearby


def _read(job: JobLike, layout: str | None = None, overrides: Sequence[str] = ()) -> Job:
    if not isinstance(job, Job):
        return load_job(job, overrides, layout)
    if overrides:
        raise InputError(f"overrides: {json.dumps(list(overrides))} need a job file; this job was read already")
    if layout is None:
        return job
    from meshwright.job.job import job_from_values
    from meshwright.job.layout_text import is_auto, parse_layout

    if is_auto(layout):
        return job_from_values({**job.model_dump(), "layout": layout})
    return job.with_layout(parse_layout(layout), source="given")
