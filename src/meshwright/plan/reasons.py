"""Why families of layouts were rejected, in one line each."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from meshwright.job.cluster import ClusterSpec
from meshwright.job.grid import rank_of
from meshwright.job.layout import Layout
from meshwright.plan.answer import Rejected
from meshwright.plan.arrays import BINDINGS, Evaluation, Layouts, Work, to_layout
from meshwright.plan.confirm import Confirmer
from meshwright.plan.evaluate import evaluate
from meshwright.plan.search import FamilyResult, Outcome
from meshwright.plan.space import Family


def rejections(
    work: Work, cluster: ClusterSpec, outcome: Outcome, chosen: Family | None, confirmer: Confirmer
) -> list[Rejected]:
    """One line for every family but the chosen one: what fits but is slower, what does not fit, what is illegal."""
    searched = [result for result in outcome.families if result.family != chosen]
    lines = _evaluated(work, cluster, searched, float(outcome.best.time[0]) if len(outcome.best) else None, confirmer)
    legal = {result.family for result in outcome.families}
    rules: dict[Family, dict[str, int]] = defaultdict(dict)
    for (family, rule), count in outcome.counts.illegal.items():
        rules[family][rule] = count
    for family, counts in rules.items():
        if family not in legal:
            rule = max(counts, key=lambda name: counts[name])
            lines.append(Rejected(family=str(family), kind="illegal", layouts=0, reason=_law(work, family, rule)))
    return lines


def _evaluated(
    work: Work, cluster: ClusterSpec, results: list[FamilyResult], fastest: float | None, confirmer: Confirmer
) -> list[Rejected]:
    if not results:
        return []
    entries = [result.best or result.closest for result in results]
    layouts = Layouts.join([entry.layouts for entry in entries if entry is not None])
    values = evaluate(work, cluster, layouts)
    lines = []
    for index, result in enumerate(results):
        layout = to_layout(layouts, index, work.spec.layers)
        common: dict[str, Any] = {"family": str(result.family), "layouts": result.evaluated, "closest": str(layout)}
        rank = fullest_rank(layout, values, index)
        exact = confirmer.known(layout)
        memory = cluster.device.memory_bytes
        if exact is not None and exact.peak > memory:
            which = "of its fastest " if result.best is not None else ""
            reason = (
                f"memory: rank {exact.rank} {which}{shortage(exact.peak, memory, exact.largest, exact.largest_bytes)}"
            )
            lines.append(
                Rejected(kind="memory", reason=reason, rank=exact.rank, lacks_bytes=exact.peak - memory, **common)
            )
        elif result.best is None:
            peak = round(float(values.peak[index]))
            largest = max(values.memory, key=lambda name: float(values.memory[name][index]))
            words = shortage(peak, memory, largest, round(float(values.memory[largest][index])))
            reason = f"memory: rank {rank} {words}"
            lines.append(Rejected(kind="memory", reason=reason, rank=rank, lacks_bytes=peak - memory, **common))
        else:
            slower = float(values.step_time[index]) / fastest if fastest else 1.0
            reason = f"time: {slower:.3g} times the fastest; {BINDINGS[values.binding[index]]} binds"
            lines.append(Rejected(kind="slower", reason=reason, rank=rank, **common))
    times = [float(values.step_time[index]) if result.best else np.inf for index, result in enumerate(results)]
    peaks = values.peak.tolist()
    return [lines[index] for index in sorted(range(len(lines)), key=lambda index: (times[index], peaks[index]))]


def fullest_rank(layout: Layout, values: Evaluation, index: int) -> int:
    """The global rank of one that holds most."""
    return rank_of(layout, (int(values.fullest[index]), 0, 0, 0))


def shortage(peak: int, memory: int, largest: str, largest_bytes: int) -> str:
    """What a rank needs, has and lacks, and what takes most of it."""
    return (
        f"needs {peak:,} bytes of {memory:,}, {peak - memory:,} too many; {largest} alone {_is(largest)} "
        f"{largest_bytes:,}"
    )


def _is(category: str) -> str:
    return "are" if category.endswith("s") else "is"


def _law(work: Work, family: Family, rule: str) -> str:
    """The rule that a whole family breaks, with its numbers."""
    spec = work.spec
    numbers = {
        "tp must divide the key/value heads": f"tp={family.tp} does not divide {spec.kv_heads} key/value heads",
        "tp must divide ffn_hidden": f"tp={family.tp} does not divide ffn_hidden={spec.ffn_hidden}",
        "no more stages than layers": f"pp={family.pp} is more stages than the {spec.layers} layers",
        "compile needs tp=1": f"tp={family.tp} does not go with train.compile, which needs tp=1",
        "workers of servers need tp=1, pp=1 and zero=0": (
            f"{'tp' if family.tp > 1 else 'pp'}={family.tp if family.tp > 1 else family.pp} does not go with servers, "
            "whose workers compute the whole model"
        ),
        "replicas that train apart must be at least two": f"dp={family.dp} leaves fewer than two replicas",
        "what [sync] asks for must go with the layout": (
            f"dp={family.dp} with tp={family.tp} pp={family.pp} does not go with what [sync] asks for"
        ),
        "compression needs dp of at least 2": f"dp={family.dp} has nothing to send compressed",
        "the schedule needs more micro-batches": (
            f"a global batch of {work.global_batch} gives each of dp={family.dp} ranks too few micro-batches "
            f"for pp={family.pp}"
        ),
    }
    return f"rule: {numbers.get(rule, rule)}"
