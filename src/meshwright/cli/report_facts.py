"""What a report shows that no record holds: predicted ledger, step time and schedule, worked out from the job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.job.cluster import ClusterSpec, cluster_from_values, load_cluster
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.job.layout_text import parse_layout
from meshwright.job.split import first_split
from meshwright.ledger.ledger import Ledger
from meshwright.observe.report import Gantt, Predicted, Records
from meshwright.observe.report_svg import show_seconds
from meshwright.plan.machines import cluster_of

_MOST_RANKS = 4096
"""Above it one rank of each pipeline rank stands for all, and traffic is left out of the prediction."""


def predict_for(records: Records) -> Predicted:
    """Everything the planner can add; what it cannot, with the reason in ``absent``."""
    absent: dict[str, str] = {}
    job = _resolved(records, absent)
    machines = _machines(records, absent)
    facts: dict[str, Any] = {}
    if machines is not None:
        facts |= {"capacity": float(machines.device.memory_bytes), "ranks_per_node": machines.devices_per_node}
    if job is None:
        return Predicted(absent=absent, **facts)
    facts["ledger"] = _ledger(job, absent)
    cluster = None
    if machines is not None:
        facts |= _costs(job, machines, facts["ledger"], absent)
        cluster = _used(job, machines, absent)
    if cluster is not None:  # with the memory and the ranks that the planner counts with
        facts |= {"capacity": float(cluster.device.memory_bytes), "ranks_per_node": cluster.devices_per_node}
        facts["basis"] = cluster.basis
    elif job.cluster.memory_per_rank_bytes is not None:
        facts["capacity"] = float(job.cluster.memory_per_rank_bytes)
    facts["gantts"] = _gantts(records, job, cluster, absent)
    return Predicted(absent=absent, **facts)


def _resolved(records: Records, absent: dict[str, str]) -> Job | None:
    """The job under the layout that is reported on."""
    job = records.job
    if job is None:
        why = f"{records.source.name} has no " + ("job.toml" if records.is_run else "job; `plan --json` writes it now")
        absent |= dict.fromkeys(("ledger", "time", "gantt"), why)
        return None
    layout = _layout(records)
    try:
        return (job if layout is None else job.with_layout(layout)).resolve(purpose="plan")
    except InputError as error:
        absent |= dict.fromkeys(("ledger", "time", "gantt"), _line(error))
        return None


def _layout(records: Records) -> Layout | None:
    """What ran; of a plan its first layout."""
    if records.is_run:
        return parse_layout(records.ledgers[-1].layout) if records.ledgers else None
    if records.plan is None or not records.plan.layouts:
        return None
    return parse_layout(records.plan.layouts[0].layout)


def _machines(records: Records, absent: dict[str, str]) -> ClusterSpec | None:
    """What the job ran on, or is planned for."""
    given = records.cluster or (None if records.plan is None else records.plan.cluster)
    if given is None:
        absent["capacity"] = "neither the job nor a plan names the machines"
        absent.setdefault("time", f"{absent['capacity']}, so no time is predicted")
        return None
    try:
        return load_cluster(given) if isinstance(given, str) else cluster_from_values(given, "cluster")
    except MeshwrightError as error:
        absent["capacity"] = absent["time"] = _line(error)
        return None


def _used(job: Job, machines: ClusterSpec, absent: dict[str, str]) -> ClusterSpec | None:
    """The machines cut to the job's ranks, and their memory to what a rank may use."""
    try:
        return cluster_of(job, machines, job.layout.ranks)
    except MeshwrightError as error:
        absent["capacity"] = _line(error)
        return None


def _ledger(job: Job, absent: dict[str, str]) -> Ledger | None:
    from meshwright.plan.planner import representative_ranks
    from meshwright.plan.predict import predict

    try:
        return predict(job, None if job.layout.ranks <= _MOST_RANKS else representative_ranks(job.layout))
    except MeshwrightError as error:
        absent["ledger"] = _line(error)
        return None


def _costs(job: Job, machines: ClusterSpec, ledger: Ledger | None, absent: dict[str, str]) -> dict[str, Any]:
    """The planner's figures of one layout: its step, its peak, and the parts of each rank's step."""
    from meshwright.plan.planner import plan_layout, representative_ranks
    from meshwright.plan.spends import predicted_spends

    try:
        entry = plan_layout(job, machines).layouts[0]
        cluster = cluster_of(job, machines, job.layout.ranks)
        spends = [predicted_spends(job, cluster, rank) for rank in representative_ranks(job.layout)]
    except MeshwrightError as error:
        absent["time"] = _line(error)
        return {}
    note = "Predicted: a pipeline rank with less to compute waits longer in the bubble."
    if abs(spends[0].wall - entry.step_time_s) > 1e-6 * spends[0].wall:
        note += (
            f" The predicted parts are the closed form's and sum to {show_seconds(spends[0].wall)}; simulating the "
            f"schedule stage by stage gives {show_seconds(entry.step_time_s)}."
        )
    facts: dict[str, Any] = {"step_time": entry.step_time_s, "peak": float(entry.peak_memory_bytes), "time_note": note}
    if ledger is not None:
        ranks = tuple(one.model_copy(update={"spends": spends[one.place["pp"]]}) for one in ledger.ranks)
        facts["ledger"] = ledger.model_copy(update={"ranks": ranks})
    return facts


def _gantts(records: Records, job: Job, cluster: ClusterSpec | None, absent: dict[str, str]) -> list[Gantt]:
    layout = job.layout
    if layout.pp == 1:
        absent["gantt"] = "pp=1: there is no pipeline"
        return []
    found = [*_planned_gantt(job, cluster, absent), *_measured_gantt(records, job)]
    if not found:
        absent.setdefault("gantt", "no machines are named and no step was timed: no stage has a time")
    return found


def _planned_gantt(job: Job, cluster: ClusterSpec | None, absent: dict[str, str]) -> Iterator[Gantt]:
    """The schedule with the planner's seconds of each stage."""
    from meshwright.plan.array_time import pass_time
    from meshwright.plan.arrays import Work, from_layouts
    from meshwright.plan.collectives import Network
    from meshwright.plan.evaluate import machine_of, rules_of
    from meshwright.plan.refine import stage_seconds
    from meshwright.plan.shape import Shape
    from meshwright.schedule.simulate import simulate

    if cluster is None or cluster.host is not None:  # where ranks share cores no stage has a time of its own
        return
    work = Work.of(job)
    try:
        columns = from_layouts([job.layout], work)
    except ValueError as error:
        absent["gantt"] = f"{error}, which the planner does not time yet"
        return
    passes = pass_time(Shape.of(work), columns, Network.of(cluster), machine_of(work, cluster), rules_of(work))
    run = simulate(_table(job), *stage_seconds(work, columns, 0, passes), float(passes.send[0]))
    yield Gantt(
        run,
        "Predicted: each stage has the planner's time for its layers, the first also the embedding, the last also the "
        f"head; messages travel beside computation and take {show_seconds(float(passes.send[0]))} each.",
        f"predicted, {_title(job)}",
    )


def _measured_gantt(records: Records, job: Job) -> Iterator[Gantt]:
    """The schedule replayed with what the ranks measured."""
    from meshwright.schedule.simulate import simulate

    table = _table(job)
    by_rank: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for ledger in records.ledgers:
        for entry in ledger.ranks:
            if entry.spends is not None and "pp" in entry.place:
                compute = entry.spends.compute
                by_rank[entry.place["pp"]].append((compute.get("forward", 0.0), compute.get("backward", 0.0)))
    if sorted(by_rank) != list(range(table.pp)):
        return
    passes = table.micro_batches * table.virtual
    seconds = [[sum(part) / len(one) / passes for part in zip(*one, strict=True)] for _, one in sorted(by_rank.items())]
    forward, backward = ([seconds[rank][which] for rank in table.rank_of_stage] for which in (0, 1))
    halves = [part / 2 for part in backward]
    run = simulate(table, forward, halves, halves)
    yield Gantt(
        run,
        "Measured, replayed: each stage has the mean of what its ranks measured for forward and backward in the timed "
        f"step, the same for each micro-batch; messages take no time. It takes {show_seconds(run.makespan)}.",
        f"measured, {_title(job)}",
    )


def _table(job: Job) -> Any:
    from meshwright.schedule.table import table

    layout = job.layout
    split = first_split(job)
    equal = job.batch.global_size // (layout.dp * (layout.micro_batch or 1))
    micro_batches = equal if split is None else split.micro_steps
    return table(layout.schedule, layout.pp, layout.virtual_stages, micro_batches)


def _title(job: Job) -> str:
    table = _table(job)
    stages = f"{table.virtual} stage{'s' * (table.virtual > 1)} a rank"
    return f"{table.schedule}: {table.pp} pipeline ranks, {stages}, {table.micro_batches} micro-batches"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
