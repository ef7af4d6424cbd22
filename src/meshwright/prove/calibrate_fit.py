"""From seconds to the constants of a cluster file: least squares on relative errors, none of them negative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.job.cluster import ClusterSpec, Level, Link, Links, Measured
from meshwright.job.efficiency import AttentionCurve, Efficiency, GemmCurve
from meshwright.job.hardware import DeviceSpec
from meshwright.job.host import Host, PassSeconds
from meshwright.plan.array_time import LayerTime, Machine, layer_time, stream_elements
from meshwright.plan.arrays import Work, from_layouts
from meshwright.plan.evaluate import evaluate
from meshwright.plan.rules import OURS
from meshwright.plan.shape import Shape
from meshwright.prove.calibrate_collectives import CollectiveTime
from meshwright.prove.calibrate_kernels import Kernels
from meshwright.prove.calibrate_program import Phases, Sharding, Split, program_job
from meshwright.prove.stopwatch import Timing

Floats = NDArray[np.float64]
GemmTimes = Mapping[tuple[int, int, int], Timing]
AttentionTimes = Mapping[tuple[int, int, int, int], Timing]


def non_negative_least_squares(columns: Floats, wanted: Floats, sweeps: int = 4000) -> Floats:
    """``x >= 0`` that makes ``columns @ x`` closest to ``wanted``: coordinate descent, exact for so few unknowns.

    Args:
        columns: ``[n, k]``.
        wanted: ``[n]``.
        sweeps: over the unknowns.
    """
    scale = np.linalg.norm(columns, axis=0)
    unit = columns / np.where(scale > 0, scale, 1.0)
    product, target = unit.T @ unit, unit.T @ wanted
    x = np.zeros(columns.shape[1])
    for _ in range(sweeps):
        for index in range(len(x)):
            if scale[index] > 0:
                x[index] = max(0.0, x[index] + target[index] - product[index] @ x)
    return x / np.where(scale > 0, scale, 1.0)


def fit_gemm(times: GemmTimes) -> tuple[float, GemmCurve]:
    """Peak FLOP/s (the best rate seen or approached) and the curve below it; see ``job/efficiency.py``."""
    shapes = np.array(list(times), float)
    seconds = np.array([timing.median for timing in times.values()])
    m, k, n = shapes.T
    best: tuple[float, float, float, float] = (np.inf, 0.0, 0.0, 0.0)
    for area in (0.0, *np.geomspace(30, 1e5, 24)):
        for depth in (0.0, *np.geomspace(1, 300, 24)):
            work = 2 * (m * n + area) * (k + depth)
            ratio = np.median(seconds / work)
            error = float(np.mean(np.abs(np.log(work * ratio / seconds))))
            if error < best[0]:
                best = (error, area, depth, 1 / ratio)
    _, area, depth, rate = best
    peak = max(rate, float(np.max(2 * m * k * n / seconds)))
    return peak, GemmCurve(efficiency=rate / peak, area_half=area, depth_half=depth)


def fit_attention(forward: AttentionTimes, both: AttentionTimes, peak: float) -> AttentionCurve:
    """Fractions of ``peak`` on causal FLOPs; backward counts 2.5 times forward's."""
    shapes = np.array(list(forward), float)
    batch, heads, sequence, size = shapes.T
    flops = 4 * batch * heads * size * sequence**2 / 2
    first = np.array([timing.median for timing in forward.values()])
    second = np.array([both[shape].median for shape in forward]) - first
    second = np.maximum(second, first)
    best: tuple[float, float, float, float] = (np.inf, 0.0, 1.0, 1.0)
    for length in (0.0, *np.geomspace(4, 1000, 40)):
        short = 1 + length / sequence
        rates = [np.median(flops * short / first), np.median(2.5 * flops * short / second)]
        errors = [
            np.abs(np.log(flops * short / rates[0] / first)),
            np.abs(np.log(2.5 * flops * short / rates[1] / second)),
        ]
        if (error := float(np.mean(errors))) < best[0]:
            best = (error, length, *rates)
    _, length, one, other = best
    return AttentionCurve(forward=min(1.0, one / peak), backward=min(1.0, other / peak), length_half=length)


@dataclass(frozen=True)
class _Known:
    """Of one calibration shape: what is known before the fit, and the counts that the unknown prices multiply."""

    phases: Phases
    products_forward: float
    """Seconds of matrix products and attention."""
    products_backward: float
    elements: float
    layers: float
    logits: float
    parameters: float
    micro_batches: float


def fit_host(measured: Sequence[Phases], machine: Machine, cores: int) -> tuple[Host, float]:
    """The program's own prices, and the median relative error of the steps they were fitted on.

    Args:
        measured: steps of several shapes on one core, in the type of ``machine``.
        machine: products and attention of one core.
        cores: of the node.
    """
    known = [_known(one, machine) for one in measured]
    forward = _fit_pass(known, [(one.phases.forward, one.products_forward) for one in known])
    backward = _fit_pass(known, [(one.phases.backward, one.products_backward) for one in known])
    tails = np.array([one.phases.optimizer + one.phases.other for one in known])
    columns = np.array([[one.parameters, 1.0] for one in known]) / tails[:, None]
    update, step = non_negative_least_squares(columns, np.ones(len(known)))
    host = Host(cores=cores, forward=forward, backward=backward, update=float(update), step=float(step))
    return host, float(np.median([abs(_predicted(one, host) / one.phases.step - 1) for one in known]))


def fit_sharding(measured: Sequence[Sharding]) -> tuple[float, float]:
    """``Host.unit`` and ``Host.sharded`` from steps of ZeRO-3: two gathers and a reduction of each group."""
    rows = []
    for one in measured:
        parameters = float(Shape.of(Work.of(program_job(one.shape))).parameters())
        passes = 3.0 * one.shape.micro_batches
        rows.append([passes * (one.shape.layers + 1), passes * parameters])
    extra = np.maximum(np.array([one.extra for one in measured]), 1e-6)
    unit, sharded = non_negative_least_squares(np.array(rows) / extra[:, None], np.ones(len(extra)))
    return float(unit), float(sharded)


def fit_split(measured: Sequence[Split], cluster: ClusterSpec) -> float:
    """``Host.tensor``: what steps under ``tp=2`` take beyond what ``cluster`` says of their computation."""
    extra = []
    for one in measured:
        job = program_job(one.shape, {"tp": 2})
        work = Work.of(job)
        computed = evaluate(work, cluster, from_layouts([job.layout], work)).step_time[0]
        extra.append((one.seconds - float(computed)) / one.collectives)
    return max(0.0, float(np.median(extra)))


def _known(phases: Phases, machine: Machine) -> _Known:
    job = program_job(phases.shape)
    shape, one = Shape.of(Work.of(job)), np.ones(1)
    rows = float(phases.shape.micro_batch * phases.shape.sequence)
    layer: LayerTime = layer_time(
        shape, one.astype(int), phases.shape.micro_batch * one.astype(int), one, pure(machine), OURS
    )
    head = machine.product(rows, shape.hidden, shape.vocabulary)
    back = machine.product(rows, shape.vocabulary, shape.hidden) + machine.product(shape.hidden, rows, shape.vocabulary)
    count, layers = float(phases.shape.micro_batches), float(phases.shape.layers)
    elements = stream_elements(shape, OURS, shape.hidden, shape.query, shape.key_value, shape.ffn)
    return _Known(
        phases=phases,
        products_forward=count * float(layers * np.sum(layer.forward) + head),
        products_backward=count * float(layers * np.sum(layer.backward) + back),
        elements=count * layers * rows * float(elements),
        layers=count * layers,
        logits=count * rows * float(shape.vocabulary),
        parameters=float(shape.parameters()),
        micro_batches=count,
    )


def pure(machine: Machine) -> Machine:
    """The same with nothing but matrix products and attention."""
    return replace(machine, launch=0.0, dispatch=0.0, bandwidth=np.inf)


_PRICES = ("element", "layer", "logit", "micro_batch", "parameter")


def _columns(one: _Known) -> list[float]:
    """What each of ``_PRICES`` is paid for, in one step."""
    return [one.elements, one.layers, one.logits, one.micro_batches, one.parameters * one.micro_batches]


def _fit_pass(known: Sequence[_Known], seconds: Sequence[tuple[float, float]]) -> PassSeconds:
    """Prices from (whole pass, its products); weighted so that the relative error of the whole pass counts."""
    whole, products = np.array(seconds).T
    columns = np.array([_columns(one) for one in known]) / whole[:, None]
    prices = non_negative_least_squares(columns, np.maximum(whole - products, 0.0) / whole)
    return PassSeconds(**dict(zip(_PRICES, map(float, prices), strict=True)))


def _predicted(one: _Known, host: Host) -> float:
    seconds = one.products_forward + one.products_backward + host.update * one.parameters + host.step
    for prices in (host.forward, host.backward):
        seconds += float(np.dot(_columns(one), [getattr(prices, name) for name in _PRICES]))
    return seconds


# -- the cluster file ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Findings:
    """All that was measured."""

    kernels: Kernels
    program: Sequence[Phases]
    """Empty on CUDA."""
    sharding: Sequence[Sharding]
    """Empty on CUDA and on one rank."""
    split: Sequence[Split]
    """The same."""
    contention: Mapping[int, float]
    collectives: Sequence[CollectiveTime]
    nodes: int
    devices_per_node: int
    cores: int
    memory_bytes: int
    """Of one rank."""
    device: str
    cuda: bool
    note: str


def cluster_of_findings(found: Findings) -> ClusterSpec:
    """The cluster file of a calibration."""
    fits = {dtype: fit_gemm(times) for dtype, times in found.kernels.gemm.items()}
    peak = fits["float32"][0]
    attention = fit_attention(found.kernels.attention_forward["float32"], found.kernels.attention_both["float32"], peak)
    bandwidth = found.kernels.stream_bytes / found.kernels.stream.median
    dispatch = found.kernels.dispatch.median
    device = DeviceSpec(
        name=found.device,
        memory_bytes=found.memory_bytes,
        memory_bandwidth=bandwidth,
        peak_flops={dtype: peak for dtype, (peak, _) in fits.items()},
        efficiency=Efficiency(
            gemm={dtype: curve for dtype, (_, curve) in fits.items()},
            attention=attention,
            memory=1.0,
            launch=dispatch,
            dispatch=dispatch if found.cuda else 0.0,
            link=1.0,
            network=1.0,
            note="peak_flops are the best rates that were reached, memory_bandwidth that of a large addition",
        ),
        source=found.note,
    )
    measured = _collectives(found.collectives)
    host, notes = None, [found.note, _spread(found)]
    if found.program:
        machine = Machine.of(peak, bandwidth, device.efficiency, "float32", 4.0)
        host, error = fit_host(found.program, machine, found.cores)
        if found.sharding:
            unit, sharded = fit_sharding(found.sharding)
            host = host.model_copy(update={"unit": unit, "sharded": sharded})
        notes.append(f"host: fitted on steps of {len(found.program)} small models, median error {error:.1%}")
    cluster = ClusterSpec(
        name=f"{found.nodes}x{found.devices_per_node} {found.device}",
        nodes=found.nodes,
        devices_per_node=found.devices_per_node,
        device=device,
        links=Links(
            intra=_link(measured, "intra", "nvlink or pcie" if found.cuda else "loopback", found.devices_per_node),
            inter=_link(measured, "inter", "network", found.nodes),
        ),
        host=host,
        basis=tuple(notes),
    )
    if host is not None and found.split:
        # Without collectives and neighbours: computation alone.
        host = host.model_copy(update={"tensor": fit_split(found.split, cluster)})
    contention = dict(found.contention) if found.program else {}
    return cluster.model_copy(update={"host": host, "collectives": measured, "contention": contention})


def _spread(found: Findings) -> str:
    """How far the quartiles of what was measured lie apart."""
    kernels = [timing.spread for times in found.kernels.gemm.values() for timing in times.values()]
    collectives = [one.timing.spread for one in found.collectives]
    parts = [f"matrix products {np.median(kernels):.0%}"]
    if found.program:
        parts.append(f"steps {np.median([one.spread for one in found.program]):.0%}")
    if collectives:
        parts.append(f"collectives {np.median(collectives):.0%}")
    return f"quartiles over median: {', '.join(parts)}"


def _collectives(times: Sequence[CollectiveTime]) -> tuple[Measured, ...]:
    keys = dict.fromkeys((one.operation, one.size, one.groups, one.level) for one in times)
    return tuple(_measured(key, [one for one in times if _key(one) == key]) for key in keys)


def _key(one: CollectiveTime) -> tuple[str, int, int, Level]:
    return one.operation, one.size, one.groups, one.level


def _measured(key: tuple[str, int, int, Level], times: Sequence[CollectiveTime]) -> Measured:
    """Alpha and beta: a straight line through the points, by relative error, and the points themselves."""
    sizes = np.array([one.bytes for one in times], float)
    # A larger message never travels faster; where it seems so, noise has slowed the smaller one.
    seconds = np.minimum.accumulate(np.array([one.timing.median for one in times])[::-1])[::-1]
    seconds = np.maximum(seconds, 1e-6)
    columns = np.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, beta = non_negative_least_squares(columns, np.ones(len(seconds)))
    return Measured(
        operation=key[0],  # type: ignore[arg-type]
        ranks=key[1],
        groups=key[2],
        level=key[3],
        alpha=float(alpha),
        beta=float(beta),
        points=tuple(zip(sizes.tolist(), seconds.tolist(), strict=True)),
    )


def _link(measured: Sequence[Measured], level: Level, kind: str, count: int) -> Link | None:
    """The link behind the sends between two ranks, alone."""
    if count == 1:
        return None
    sends = [one for one in measured if one.operation == "send" and one.level == level]
    one = min(sends, key=lambda each: (each.ranks, each.groups))
    return Link(kind=kind, bandwidth=min(1 / max(one.beta, 1e-13), 1e13), latency=one.alpha)
