"""Memory and time of many layouts at once: what the search ranks.

Work is done in blocks that stay in the processor's cache. A layer's time depends on few columns, so it is computed once
for each combination of them that occurs.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.job.cluster import ClusterSpec
from meshwright.job.memory import DTYPE_BYTES
from meshwright.plan.array_memory import memory_use
from meshwright.plan.array_time import LayerTime, Machine, StepTime, layer_time, step_time
from meshwright.plan.arrays import BINDINGS, Bools, Evaluation, Floats, Ints, Layouts, Work
from meshwright.plan.collectives import Network
from meshwright.plan.rules import OURS, Rules
from meshwright.plan.shape import Shape
from meshwright.plan.shared_cores import shared_step_time
from meshwright.plan.stages import held
from meshwright.plan.sync_legs import SyncTerms

_BLOCK = 8192
"""Layouts of one block."""


def evaluate(work: Work, cluster: ClusterSpec, layouts: Layouts, rules: Rules | None = None) -> Evaluation:
    """What each layout costs on the cluster.

    Args:
        work: the step.
        cluster: devices and links.
        layouts: columns; each takes at most the cluster's devices.
        rules: of the program that runs; absent: meshwright's own.

    Raises:
        InputError: the device has no rate for the work's type, or a rate makes utilisation pass 100 %.
    """
    blocks = [
        _evaluate(work, cluster, layouts.take(slice(start, start + _BLOCK)), rules or rules_of(work))
        for start in range(0, len(layouts), _BLOCK)
    ]
    if len(blocks) == 1:
        return blocks[0]
    return _join(blocks)


def rules_of(work: Work) -> Rules:
    """The rules of meshwright itself for the work's type and optimizer."""
    element = DTYPE_BYTES[work.dtype]
    wide = max(4, element)
    moments = 2 if work.optimizer == "adamw" else int(work.momentum > 0)
    return replace(
        OURS,
        parameter_bytes=float(element),
        gradient_bytes=float(wide),
        master_bytes=float(wide if element < wide else 0),
        moment_bytes=float(moments * wide),
        wire_bytes=float(wide),
        gather_bytes=float(element),
        wire_tp_bytes=float(element),
        logit_bytes=float(element),
        head_gradient_bytes=float(element),
        fused_attention=work.fused_attention,
        dropout=work.spec.dropout > 0,
        full_working_copy=False,
    )


def machine_of(work: Work, cluster: ClusterSpec) -> Machine:
    """The rates of the cluster's device for the work's type."""
    device = cluster.device
    peak = device.peak(work.dtype)
    return Machine.of(peak, device.memory_bandwidth, device.efficiency, work.dtype, float(DTYPE_BYTES[work.dtype]))


def _evaluate(work: Work, cluster: ClusterSpec, layouts: Layouts, rules: Rules) -> Evaluation:
    shape, machine, network = Shape.of(work), machine_of(work, cluster), Network.of(cluster)
    ranks, terms = held(layouts, shape.layers), SyncTerms.of(work, cluster, rules)
    if cluster.host is not None:
        time = shared_step_time(shape, layouts, cluster, machine, rules, terms)
    else:
        layer = _layer_times(shape, layouts, machine, rules)
        time = step_time(shape, layouts, network, machine, rules, layer, ranks, terms)
    memory = memory_use(shape, layouts, rules, machine.element, ranks)
    model_flops = shape.model_flops() / layouts.ranks
    mfu = model_flops / (time.total * cluster.device.peak(work.dtype))
    if np.any(mfu > 1):
        worst = float(np.max(mfu))
        raise InputError(
            f"cluster: a layout would reach {worst:.0%} of {cluster.device.name}'s dense peak, which no device can; "
            "the device's efficiency constants or its peak_flops (dense, FLOP/s) are wrong"
        )
    fits = memory.peak <= cluster.device.memory_bytes
    return Evaluation(
        memory=memory.parts,
        peak=memory.peak,
        fullest=memory.fullest,
        fits=fits,
        step_time=time.total,
        time=time.parts,
        tokens_per_s=work.tokens / time.total,
        mfu=mfu,
        model_flops=model_flops,
        binding=_binding(time, fits),
    )


def _layer_times(shape: Shape, layouts: Layouts, machine: Machine, rules: Rules) -> LayerTime:
    """``layer_time`` of each (tp, micro-batch, sequence parallel) that occurs, spread to the layouts."""
    key = (layouts.micro_batch * (int(layouts.tp.max()) + 1) + layouts.tp) * 2 + layouts.sequence_parallel
    first, inverse = _distinct(key)
    some = layouts.take(first)
    few = layer_time(shape, some.tp, some.micro_batch, some.sequence_parallel.astype(float), machine, rules)
    return LayerTime(**{name: np.broadcast_to(value, first.shape)[inverse] for name, value in vars(few).items()})


def _distinct(key: Ints) -> tuple[Ints, Ints]:
    """Where each distinct key stands first, and which of them every entry has."""
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


_PARTS = {
    "compute": ("forward", "backward", "recompute"),
    "tensor-parallel communication": ("tp",),
    "shard communication": ("shard",),
    "replicate communication": ("replicate",),
    "pipeline transfers": ("pp",),
    "pipeline bubble": ("bubble",),
    "optimizer": ("optimizer",),
    "waiting": ("waiting",),
    "overhead": ("other",),
}


def _binding(time: StepTime, fits: Bools) -> Ints:
    """Memory where the layout does not fit; else compute where it is most of the step; else the largest other part."""
    totals = np.stack([sum(time.parts.get(part, 0.0) for part in _PARTS[name]) for name in BINDINGS[1:]])
    others = np.argmax(totals[1:], axis=0) + 2
    compute = totals[0] >= 0.75 * time.total
    return np.where(~fits, 0, np.where(compute, 1, others))


def _join(blocks: list[Evaluation]) -> Evaluation:
    def table(name: str) -> dict[str, Floats]:
        return {
            key: np.concatenate([getattr(block, name)[key] for block in blocks]) for key in getattr(blocks[0], name)
        }

    tables: dict[str, Any] = {name: table(name) for name in ("memory", "time", "extra")}
    others = [each.name for each in fields(Evaluation) if each.name not in tables]
    columns: dict[str, Any] = {name: np.concatenate([getattr(block, name) for block in blocks]) for name in others}
    return Evaluation(**tables, **columns)
