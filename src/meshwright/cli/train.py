"""``meshwright train``: check the job, make the run directory, start the ranks (or be one), report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.checkpoint.folder import CHECKPOINTS, steps
from meshwright.cli.auto import settled_layout, settled_sync
from meshwright.errors import InputError
from meshwright.job.job import Job, load_job
from meshwright.recovery.environment import Begin, RankPlace, detect_environment, restarted
from meshwright.recovery.launch import check_port, launch
from meshwright.recovery.lock import RunLock
from meshwright.recovery.threads import threads
from meshwright.train.prepare import prepare_run
from meshwright.verbs import for_fewer_ranks


def train(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job file.")],
    out: Annotated[Path, typer.Option(help="Directory of the run; new or empty, unless it goes on (--resume).")],
    layout: Annotated[str | None, typer.Option(help='Replaces the job\'s layout: "dp=2 tp=2"; auto: planned.')] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeatable.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="Go on if --out holds a run, else start: the same each time.")
    ] = False,
    from_step: Annotated[
        int | None, typer.Option(min=0, help="With --resume: from this checkpoint; later ones are put aside.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Rendezvous port on this machine; absent: a free one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Train a model under the job's layout, or the planner's where that is "auto".

    On one machine it starts its own ranks; under torchrun, srun or a Kubernetes Job it is one of them.
    Ctrl-C or SIGTERM saves and stops.
    """
    if from_step is not None and not resume:
        raise InputError(f"--from-step: {from_step} is of a run that goes on; give --resume too")
    if resume and resume_or_start:
        raise InputError("--resume-or-start: resumes where there is a run else starts one; leave it or --resume out")
    place = detect_environment()
    # By torchrun, after a failure: from the last checkpoint, whichever it began from.
    again = resume_or_start or (place is not None and restarted())
    run = out if resume or again else None
    planned = settled_layout(load_job(job_file, overrides or [], layout), place, run, as_json)
    job = planned.job.resolve(place.world_size, ranks_from=place.source) if place else planned.job.resolve()
    job = settled_sync(job, as_json or (place is not None and place.rank != 0))
    check_port(port)  # before anything is written
    threads()
    if job.sync.strategy == "server":
        if port is not None:
            raise InputError(
                f"--port: {port} is where ranks meet, which sync.strategy=server has not; leave it out, or use "
                f"--set sync.server_port={port}"
            )
        if resume_or_start:
            raise InputError("--resume-or-start: sync.strategy=server replaces its own processes; leave it out")
        _train_with_servers(job, out, resume, from_step, as_json, place, planned.write)
        return
    held: list[RunLock] = []  # the lock of the directory, until this process ends

    def prepare() -> Begin:
        begin = Begin(resume=resume, restart=False)
        if again and (out / "job.toml").is_file():
            begin = Begin(resume=bool(steps(out / CHECKPOINTS)), restart=True)
        if begin.restart and not begin.resume:  # it failed before its first checkpoint
            held.append(RunLock(out))
            return begin
        held.append(prepare_run(job, out, resume=begin.resume, from_step=None if begin.restart else from_step))
        planned.write(out)
        return begin

    if place is not None:
        _be_a_rank(place, job, out, as_json, prepare)
        return
    begin = prepare()
    if not as_json:
        print(f"training {job.model_spec.name} ({job.model_spec.parameter_count:,} parameters) on {job.layout.ranks} "
              f"ranks: {job.layout}", flush=True)  # fmt: skip
    words = [f"--{name}" for name, on in (*begin._asdict().items(), ("quiet", as_json)) if on]
    launch(out, job, words, port=port, replan=for_fewer_ranks)
    _report(job, out, as_json)


def _train_with_servers(
    job: Job, out: Path, resume: bool, from_step: int | None, as_json: bool, place: RankPlace | None,
    write_plan: Callable[[Path], None],
) -> None:  # fmt: skip
    from meshwright.train.servers.run import check_servers, train_with_servers

    if place is not None:
        raise InputError(
            f"sync.strategy: server starts its own servers and workers, but {place.source} started this process as one "
            "rank; run `meshwright train` by itself"
        )
    check_servers(job)  # before anything is written
    lock = prepare_run(job, out, resume=resume, from_step=from_step)
    write_plan(out)
    if not as_json:
        model, servers = job.model_spec, job.sync.servers * job.sync.server_replicas
        print(f"training {model.name} ({model.parameter_count:,} parameters) on {job.layout.dp} workers and {servers} "
              f"servers: {job.sync.server_mode}", flush=True)  # fmt: skip
    with lock:
        train_with_servers(job, out, resume=resume, quiet=as_json)
    _report(job, out, as_json)


def _be_a_rank(place: RankPlace, job: Job, out: Path, as_json: bool, prepare: Callable[[], Begin]) -> None:
    from meshwright.recovery.rank import run_as_rank
    from meshwright.train.worker import train_rank

    place.export()

    def work() -> None:
        train_rank(out, resume=False, job=job, quiet=as_json, prepare=prepare)
        if place.rank == 0:
            _report(job, out, as_json)

    run_as_rank(work)


def _report(job: Job, out: Path, as_json: bool) -> None:
    from meshwright.train.report import finish_report

    summary: dict[str, Any] = finish_report(job, out, quiet=as_json)
    if as_json:
        print(json.dumps(summary))
    sys.stdout.flush()
