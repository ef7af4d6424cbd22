"""``meshwright report``: what a run directory or a plan holds, as sections of one page.

This room reads records and draws; what is predicted is handed in as :class:`Predicted` by whoever may ask the planner.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.errors import InputError
from meshwright.job.job import Job, run_job
from meshwright.ledger.ledger import Ledger
from meshwright.observe.records import read_json_lines
from meshwright.plan.answer import Plan
from meshwright.schedule.simulate import Simulation

RUN_FILES = ("job.toml", "plan.json", "cluster.json", "ledger.json", "traced.json", "metrics.jsonl", "events.jsonl",
             "summary.json")  # fmt: skip
"""What a report reads of a run directory; any of them may be missing. ``traced.json`` is a ledger too."""


@dataclass(frozen=True)
class Records:
    """What a run directory or a plan file holds."""

    source: Path
    job: Job | None = None
    plan: Plan | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)
    """What a plan expects of failures and checkpoints."""
    cluster: dict[str, Any] | str | None = None
    """A cluster's values, or its short name."""
    ledgers: Sequence[Ledger] = ()
    metrics: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    missing: Sequence[str] = ()
    is_run: bool = True


@dataclass(frozen=True)
class Gantt:
    """A schedule in time, and where its times are from."""

    simulation: Simulation
    words: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What only the planner can say about the records; each may be absent."""

    ledger: Ledger | None = None
    """With spends where the machines are known."""
    time_note: str = ""
    """What there is to say of its spends."""
    step_time: float | None = None
    peak: float | None = None
    capacity: float | None = None
    """Bytes of a device that a rank's peak may take."""
    basis: Sequence[str] = ()
    """What about the machines was assumed."""
    ranks_per_node: int | None = None
    gantts: Sequence[Gantt] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    """By what is absent (ledger, gantt, time, capacity): why."""


def read_records(path: Path) -> Records:
    """A run directory, or the JSON that ``meshwright plan --json`` prints.

    Raises:
        InputError: there is no such thing, or it is neither; a file in it is damaged.
    """
    if path.is_dir():
        return _read_run(path)
    if not path.exists():
        raise InputError(f"report: {path} does not exist; give a run directory, or a file of `meshwright plan --json`")
    values = _object(path)
    if "compared" in values and "layouts" not in values:
        raise InputError(f"report: {path} compares layouts; give the JSON of `meshwright plan` without --compare")
    if "layouts" not in values or "searched" not in values:
        raise InputError(
            f"report: {path} is no plan: it has no layouts; give a run directory, or a file of `meshwright plan --json`"
        )
    return Records(
        path,
        job=_job_of(values.get("job"), path),
        plan=_plan_of(values, path),
        expected=(values.get("days") or {}).get("checkpoints") or {},
        cluster=values.get("machines") or values.get("cluster"),
        is_run=False,
    )


def _read_run(path: Path) -> Records:
    found = {name for name in RUN_FILES if (path / name).is_file()}
    if not found & {"job.toml", "ledger.json", "metrics.jsonl", "events.jsonl", "summary.json", "plan.json"}:
        raise InputError(
            f"report: {path} is no run directory: it has none of {', '.join(RUN_FILES)}; "
            "give what `meshwright train --out` wrote"
        )

    def read(name: str, reader: Callable[[Path], Any], default: Any) -> Any:
        return reader(path / name) if name in found else default

    job = read("job.toml", lambda file: run_job(file.parent), None)
    ledgers = [read(name, _ledger, None) for name in ("ledger.json", "traced.json")]
    machines = job.cluster.machines if job is not None else None
    return Records(
        path,
        job=job,
        plan=read("plan.json", lambda file: _plan_of(_object(file), file), None),
        cluster=read("cluster.json", _object, machines),
        ledgers=[ledger for ledger in ledgers if ledger is not None],
        metrics=read("metrics.jsonl", _lines, ()),
        events=read("events.jsonl", _lines, ()),
        summary=read("summary.json", _object, {}),
        missing=[name for name in RUN_FILES if name not in found],
    )


def _job_of(values: object, path: Path) -> Job | None:
    if values is None:
        return None
    from meshwright.job.job import job_from_values

    if not isinstance(values, dict):
        raise InputError(f"report: {path}: job is {type(values).__name__}; it must be an object, as `plan` writes it")
    return job_from_values(values)


def _plan_of(values: dict[str, Any], path: Path) -> Plan:
    """The answer itself, without what `plan --json` prints beside it."""
    try:
        return Plan.model_validate({name: value for name, value in values.items() if name in Plan.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"report: {path}: {place}: {first['msg']}; expected what `meshwright plan` writes") from None


def _ledger(path: Path) -> Ledger:
    return Ledger.from_json(_text(path), str(path))


def _object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(_text(path))
    except ValueError as error:
        raise InputError(f"report: {path} is no JSON: {error}; write it anew") from None
    if not isinstance(values, dict):
        raise InputError(f"report: {path} holds a JSON {type(values).__name__}; it must be an object")
    return values


def _lines(path: Path) -> list[dict[str, Any]]:
    _text(path)
    try:
        return read_json_lines(path)
    except ValueError as error:
        raise InputError(f"report: {error}; drop that line") from None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"report: {path} is no UTF-8 text; write it anew") from None
