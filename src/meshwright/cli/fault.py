"""``meshwright fault``: the kinds of fault there are, those of a run, and new ones for a run that listens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.errors import InputError, MeshwrightError
from meshwright.job.fault_section import KINDS, SAVE_PHASES, STEP_PHASES, Fault, fault_problem, parse_fault
from meshwright.job.job import run_job
from meshwright.observe.records import read_json_lines
from meshwright.train.faults.fired import Fired, named

_POLL_SECONDS = 0.1


def fault(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="The run's directory.")] = None,
    faults: Annotated[
        list[str] | None,
        typer.Argument(metavar="FAULT", help='New faults, each such as "kill rank=1 step=50 phase=backward".'),
    ] = None,
    kinds: Annotated[bool, typer.Option("--kinds", help="List the kinds of fault and their options.")] = False,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Until they have happened; exit code 1 if they have not.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Inject faults into a run, each addressed by rank, step and phase, or show those of a run.

    The run must have been started with --set fault.listen=true; it takes them between steps. Faults that are known
    beforehand stand in the job, as [fault] inject. Every fault happens once, also when the run is resumed.
    """
    if kinds:
        _print({name: vars(kind) for name, kind in KINDS.items()}, _kind_lines(), as_json)
        return
    if run is None:
        raise InputError("fault: no run is given; give a run's directory, or --kinds to see what can be injected")
    if not (run / "job.toml").is_file():
        raise InputError(f"fault: {run} holds no run (no job.toml); give the directory of a run")
    if faults:
        names = _ask(run, faults)
        missed = _wait(run, names, wait) if wait else []
        _print({"asked": names, "missed": missed}, [f"asked for {name}" for name in names], as_json)
        if missed:
            raise MeshwrightError(f"fault: {', '.join(missed)} did not happen within {wait:g} s")
        return
    _show(run, as_json)


def _ask(run: Path, texts: list[str]) -> list[str]:
    """Check all faults against the run, then leave them for it; their names."""
    job = run_job(run)
    if not job.fault.listen:
        raise InputError(f"fault: {run} does not listen; start or resume it with --set fault.listen=true")
    reached = max((int(record.get("step", 0)) for record in read_json_lines(run / "metrics.jsonl")), default=0)
    found: list[Fault] = []
    for text in texts:
        try:
            one = parse_fault(text)
        except InputError as error:
            raise InputError(f"fault: {error}") from None
        problem = fault_problem(one, job)
        if problem is None and one.step <= reached:
            problem = f"the run has done {reached} steps; use step={reached + 2} or later"
        if problem:
            raise InputError(f'fault: "{one}": {problem}')
        found.append(one)
    return [Fired(run).ask(one) for one in found]


def _wait(run: Path, names: list[str], seconds: float) -> list[str]:
    """Until all have happened or the time is over; those that have not."""
    fired, deadline = Fired(run), time.monotonic() + seconds
    while True:
        missing = [name for name in names if not fired.has(name)]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_POLL_SECONDS)


def _show(run: Path, as_json: bool) -> None:
    fired = Fired(run)
    records = fired.records()
    waiting = [*named(run_job(run).fault.faults), *fired.asked()]
    pending = [str(one) for name, one in waiting if not fired.has(name)]
    lines = [f"happened  {record['fault']}  (process {record['pid']})" for record in records]
    lines += [f"waits     {text}" for text in pending]
    _print({"happened": records, "waiting": pending}, lines or ["no faults"], as_json)


def _kind_lines() -> list[str]:
    width = max(map(len, KINDS))
    lines = ["KIND rank=R step=S [phase=P] [micro_batch=N] [option=value ...]", ""]
    lines += [f"{name:<{width}}  {kind.does.replace('`', '')} [phase={kind.phase}]" for name, kind in KINDS.items()]
    return [*lines, "", f"phases of a step: {', '.join(STEP_PHASES)}", f"of its checkpoint: {', '.join(SAVE_PHASES)}"]


def _print(facts: Any, lines: list[str], as_json: bool) -> None:
    print(json.dumps(facts) if as_json else "\n".join(lines))
