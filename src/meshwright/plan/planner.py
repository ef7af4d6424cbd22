"""``plan``: from a job and a cluster to the layout to run, its runners-up, and why not the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from meshwright.errors import InputError
from meshwright.job.cluster import ClusterSpec
from meshwright.job.grid import rank_of
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.job.layout_text import parse_layout
from meshwright.job.sync_section import SyncSection
from meshwright.job.validate_delayed import delayed_problems
from meshwright.job.validate_sync import sync_problems
from meshwright.plan.answer import Plan, PlannedLayout
from meshwright.plan.arrays import (
    BINDINGS,
    RECOMPUTES,
    Floats,
    Layouts,
    Work,
    from_layouts,
    to_layout,
)
from meshwright.plan.confirm import Candidate, Confirmer, ExactPeak, exact_peak
from meshwright.plan.evaluate import evaluate
from meshwright.plan.legality import Modes
from meshwright.plan.machines import cluster_of, one_rank_a_core, with_devices, without_budget
from meshwright.plan.placement import placement_sentence
from meshwright.plan.predict import predict
from meshwright.plan.reasons import fullest_rank, rejections
from meshwright.plan.refine import refine
from meshwright.plan.search import Outcome, Progress, Ranked, search
from meshwright.plan.space import Family, Space
from meshwright.plan.sync_words import sync_sentence, warms_up

_FRONT = 50
"""Most entries of the Pareto front that an answer holds."""


def plan(
    job: Job,
    cluster: ClusterSpec | str | None = None,
    *,
    ranks: int | None = None,
    top: int = 10,
    delayed: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest layout that fits.

    Args:
        job: what is trained; its own layout does not matter.
        cluster: on what: ``NODESxDEVICES NAME``, a cluster file, or read already; absent: ``[cluster] machines``.
        ranks: how many devices to use; absent: ``cluster.ranks``, or all (of shared processors: one a core).
        top: how many layouts to answer with.
        delayed: try ``schedule=2bw`` too, which takes each gradient one update late.
        progress: told how far the search is.

    Raises:
        InputError: the model cannot be planned, or nothing says which machines there are; or the job does not go with
            what ``delayed`` asks for; or no layout of the devices goes with the job's [sync].
    """
    machines = cluster_of(job, cluster, ranks)
    if ranks is None and job.cluster.ranks is None:
        machines = one_rank_a_core(machines)
    check_plannable(job)
    wrong = [*delayed_problems(job.with_layout(Layout(pp=2, schedule="2bw")))] if delayed else []
    if wrong:
        raise InputError("\n".join(wrong))
    work = Work.of(job)
    modes = replace(Modes.of(job), delayed=delayed)
    space = Space(work, machines.devices, machines.devices_per_node, modes)
    began = time.monotonic()
    outcome = search(space, machines, progress=progress)
    if not outcome.counts.legal and modes.asking is not None:
        wrong = [*sync_problems(job.with_layout(Layout(dp=machines.devices)))]
        if wrong:
            raise InputError("\n".join(wrong))
    return _answer(job, work, machines, outcome, began, top)


def plan_layout(job: Job, cluster: ClusterSpec | str | None = None) -> Plan:
    """What the job's own layout is predicted to cost; nothing is searched.

    Raises:
        InputError: as ``plan``, or the layout is one that only ``predict`` knows.
    """
    check_plannable(job)
    resolved = without_budget(job).resolve(purpose="plan")  # what is wrong with the job comes before its machines
    machines = cluster_of(job, cluster, job.layout.ranks)
    work = Work.of(resolved)
    began = time.monotonic()
    entry = evaluated(resolved, machines)
    return Plan(
        model=work.spec.name,
        cluster=cluster_words(machines),
        searched=1,
        illegal=0,
        seconds=time.monotonic() - began,
        layouts=(entry,),
        rejected=(),
        placement=_placement(resolved, resolved.layout, machines),
        sync=_sync(resolved, machines, entry),
        basis=machines.basis,
    )


def evaluated(job: Job, cluster: ClusterSpec) -> PlannedLayout:
    """A resolved job's layout: memory to the byte, time by event simulation.

    Raises:
        InputError: its stages, recomputation or placement differ from rank to rank in a way that is not planned.
    """
    work = Work.of(job)
    try:
        columns = from_layouts([job.layout], work)
    except ValueError as error:
        raise InputError(f"{error}, which the planner does not time yet; leave that out") from None
    times = refine(work, cluster, columns)
    return _entries(work, cluster, columns, times, [exact_peak(job, job.layout)])[0]


def check_plannable(job: Job) -> None:
    """Refuse a model or a division of the batch whose costs are not known.

    Raises:
        InputError: why.
    """
    spec = job.model_spec
    for name in ("split", "micro_batch_limits"):
        values = getattr(job.batch, name)
        if isinstance(values, tuple):
            raise InputError(
                f"batch.{name}: {','.join(map(str, values))} is of one layout, but layouts are planned with equal "
                f'batches; leave it out (--set batch.{name}=[]); split = "auto" alone starts with equal ones'
            )
    if spec.experts:
        raise InputError(f"model: experts={spec.experts} cannot be planned yet; use a dense model (experts=0)")
    if spec.positions == "learned" and job.data.sequence_length > spec.max_positions:
        raise InputError(
            f"data.sequence_length: {job.data.sequence_length} is above the {spec.max_positions} learned positions of "
            f"the model (model.max_positions); use 1 to {spec.max_positions}"
        )


def cluster_words(cluster: ClusterSpec) -> str:
    """Nodes, devices and their name."""
    return f"{cluster.nodes}x{cluster.devices_per_node} {cluster.device.name}"


def _answer(job: Job, work: Work, cluster: ClusterSpec, outcome: Outcome, began: float, top: int) -> Plan:
    confirmer = Confirmer(job, cluster.device.memory_bytes)
    layouts = _best(confirmer, work, cluster, outcome, top)
    family, placement, sync = None, "", ""
    if layouts:
        chosen = parse_layout(layouts[0].layout)
        family = Family(pp=chosen.pp, tp=chosen.tp, dp=chosen.dp)
        placement = _placement(job, chosen, cluster)
        sync = _sync(job.with_layout(chosen), cluster, layouts[0])
    elif (closest := _closest(outcome)) is not None:
        exact = confirmer.exact(to_layout(closest.layouts, 0, work.spec.layers))
        layouts = _entries(work, cluster, closest.layouts, closest.time, [exact])
    front = outcome.pareto.take(_thinned(len(outcome.pareto)))
    return Plan(
        model=work.spec.name,
        cluster=cluster_words(cluster),
        searched=outcome.counts.legal,
        illegal=sum(outcome.counts.illegal.values()),
        seconds=time.monotonic() - began,
        layouts=tuple(layouts),
        rejected=tuple(rejections(work, cluster, outcome, family, confirmer)),
        pareto=tuple(_entries(work, cluster, front.layouts, front.time)) if len(front) else (),
        points=tuple(outcome.points),
        placement=placement,
        sync=sync,
        basis=cluster.basis,
    )


def _best(confirmer: Confirmer, work: Work, cluster: ClusterSpec, outcome: Outcome, top: int) -> list[PlannedLayout]:
    """The fastest by simulation that the predicted ledger confirms to fit."""
    ranked = _candidates(outcome)
    if not len(ranked):
        return []
    times = refine(work, cluster, ranked.layouts)
    order = np.lexsort((np.arange(len(ranked)), ranked.memory, times))
    candidates = (
        Candidate(int(index), to_layout(ranked.layouts, int(index), work.spec.layers), float(ranked.memory[index]))
        for index in order
    )
    found = list(islice(confirmer.fitting(candidates), top))
    which = np.array([candidate.number for candidate, _ in found], np.int64)
    return _entries(work, cluster, ranked.layouts.take(which), times[which], [exact for _, exact in found])


def _candidates(outcome: Outcome) -> Ranked:
    """The fastest of all, the fastest of each family and the Pareto front: what is timed by simulation."""
    parts = [outcome.best, *(result.best for result in outcome.families if result.best is not None), outcome.pareto]
    return Ranked.join(parts)


def _closest(outcome: Outcome) -> Ranked | None:
    found = [result.closest for result in outcome.families if result.closest is not None]
    return min(found, key=lambda entry: float(entry.memory[0])) if found else None


def _thinned(length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.unique(np.linspace(0, length - 1, min(length, _FRONT)).astype(np.int64)) if length else np.arange(0)


def _entries(
    work: Work, cluster: ClusterSpec, layouts: Layouts, times: Floats, exact: Sequence[ExactPeak] | None = None
) -> list[PlannedLayout]:
    """Entries of an answer; ``times`` replaces the closed form's step times, ``exact`` its memory."""
    if not len(layouts):
        return []
    values = evaluate(work, cluster, layouts)
    warm = warmup_times(work, cluster, layouts)
    alone = one_device_tokens(work, cluster)
    entries = []
    for index in range(len(layouts)):
        layout = to_layout(layouts, index, work.spec.layers)
        seconds = float(times[index])
        speed = work.tokens / seconds
        peak, rank = round(float(values.peak[index])), fullest_rank(layout, values, index)
        if exact is not None:
            peak, rank = exact[index].peak, exact[index].rank
        fits = peak <= cluster.device.memory_bytes
        entries.append(
            PlannedLayout(
                layout=str(layout),
                fits=fits,
                step_time_s=seconds,
                tokens_per_s=speed,
                mfu=float(values.mfu[index] * values.step_time[index]) / seconds,
                peak_memory_bytes=peak,
                fullest_rank=rank,
                binding=BINDINGS[values.binding[index] if fits else 0],
                useful_speedup=speed / alone,
                efficiency=speed / alone / cluster.devices,
                warmup_step_time_s=None if warm is None else float(warm[index]),
            )
        )
    return entries


def warmup_times(work: Work, cluster: ClusterSpec, layouts: Layouts) -> Floats | None:
    """Seconds of a step of the warm-up, in which gradients are summed whole; None: there is none."""
    if not warms_up(work.sync):
        return None
    sync = SyncSection(bucket_bytes=work.sync.bucket_bytes)
    return refine(replace(work, sync=sync), cluster, layouts)


def _sync(job: Job, cluster: ClusterSpec, entry: PlannedLayout) -> str:
    work = Work.of(job)
    values = evaluate(work, cluster, from_layouts([job.layout], work))
    parts = {name: float(part[0]) for name, part in values.time.items()}
    return sync_sentence(job, entry.step_time_s, parts, entry.warmup_step_time_s)


def one_device_tokens(work: Work, cluster: ClusterSpec) -> float:
    """Tokens/s predicted for one device, the best of micro-batch sizes and recomputation that fits; if none fits,
    the best of all: what a device with enough memory would do.
    """
    share = np.unique(np.minimum(2 ** np.arange(12), work.global_batch))
    sizes, policy = (grid.ravel() for grid in np.meshgrid(share, np.arange(len(RECOMPUTES))))
    columns = Layouts.make(micro_batch=sizes, recompute=policy, micro_batches=-(-work.global_batch // sizes))
    values = evaluate(work, with_devices(cluster, 1), columns)
    speed = np.where(values.fits, values.tokens_per_s, 0.0) if values.fits.any() else values.tokens_per_s
    return float(speed.max())


def representative_ranks(layout: Layout) -> list[int]:
    """One rank of each pipeline rank: those of a pipeline rank hold and send alike, up to padding."""
    return [rank_of(layout, (pp, 0, 0, 0)) for pp in range(layout.pp)]


def sent_by_axis(job: Job, layout: Layout) -> dict[str, float]:
    """Bytes that a rank in the middle of the pipeline sends in a step, by axis, as NCCL moves them."""
    resolved = without_budget(job).with_layout(layout).resolve(layout.ranks, purpose="plan")
    rank = rank_of(layout, (layout.pp // 2, 0, 0, 0))
    sends = predict(resolved, [rank], backend="nccl").ranks[0].sends
    axes = {send.axis for send in sends}
    return {axis: float(sum(send.wire for send in sends if send.axis == axis)) for axis in axes}


def _placement(job: Job, layout: Layout, cluster: ClusterSpec) -> str:
    sent = sent_by_axis(job, layout) if layout.ranks > 1 else {}
    return placement_sentence(layout, cluster, sent)
