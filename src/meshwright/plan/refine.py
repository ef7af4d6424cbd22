"""The best layouts timed again: their pipeline schedules by event simulation, stage by stage.

The closed form of ``array_time`` takes the slowest pipeline rank and a formula for the bubble. Here every stage has
its own time and every message its turn. What lies outside the pipeline (the optimizer, gradients, waiting) is taken
from the closed form.
"""

from __future__ import annotations

import numpy as np

from meshwright.job.cluster import ClusterSpec
from meshwright.job.layout import DELAYED_SCHEDULES
from meshwright.plan.array_time import MicroBatchSeconds, pass_time
from meshwright.plan.arrays import RECOMPUTES, SCHEDULES, Evaluation, Floats, Layouts, Work, stage_counts
from meshwright.plan.collectives import Network
from meshwright.plan.evaluate import evaluate, machine_of, rules_of
from meshwright.plan.rules import Rules
from meshwright.plan.shape import Shape
from meshwright.plan.sync_legs import SyncTerms
from meshwright.schedule.simulate import Sends, simulate
from meshwright.schedule.table import table

_FULL = RECOMPUTES.index("full")
_IN_PIPELINE = ("forward", "backward", "recompute", "tp", "pp", "bubble")
_PERIODIC_FROM = 6
"""Micro-batches a pipeline rank after which each ``pp`` more take as long as the last ``pp`` did."""


def refine(work: Work, cluster: ClusterSpec, layouts: Layouts) -> Floats:
    """Step times of each layout in seconds; those without a pipeline, or on shared cores, keep the closed form's."""
    values = evaluate(work, cluster, layouts)
    times = np.array(values.step_time, float)
    piped = np.flatnonzero(layouts.pp > 1)
    # Where ranks share processor cores no schedule decides when each computes.
    if not len(piped) or cluster.host is not None:
        return times
    rules = rules_of(work)
    terms = SyncTerms.of(work, cluster, rules)
    passes = pass_time(Shape.of(work), layouts, Network.of(cluster), machine_of(work, cluster), rules, terms)
    outside = _outside(values, layouts, passes)
    for index in piped:
        times[index] = outside[index] + _pipeline(work, layouts, int(index), passes, rules)
    return times


def _outside(values: Evaluation, layouts: Layouts, passes: MicroBatchSeconds) -> Floats:
    """Seconds of a step outside the pipeline."""
    inside = sum(values.time[name] for name in _IN_PIPELINE if name in values.time)
    return np.asarray(values.step_time - inside - layouts.micro_batches * passes.host, float)


def _pipeline(work: Work, layouts: Layouts, index: int, passes: MicroBatchSeconds, rules: Rules) -> float:
    """Seconds from the first forward to the last backward of one layout."""
    pp, virtual, count = (int(column[index]) for column in (layouts.pp, layouts.virtual, layouts.micro_batches))
    schedule = SCHEDULES[int(layouts.schedule[index])]
    forward, given, weight = stage_seconds(work, layouts, index, passes)
    send = float(passes.send[index])
    sends: Sends = "overlapped" if rules.overlap_pipeline > 0.5 else "blocking"

    def makespan(micro_batches: int) -> float:
        run = table(schedule, pp, virtual, micro_batches)
        return simulate(run, forward, given, weight, send, sends=sends).makespan

    fewer = _PERIODIC_FROM * pp
    if schedule in DELAYED_SCHEDULES:  # a step between others: all the time as in the middle of a long one
        return (makespan(2 * fewer) - makespan(fewer)) * count / fewer
    if count % pp or count <= fewer + pp:
        return makespan(count)
    first, second = makespan(fewer), makespan(fewer + pp)
    return second + (second - first) * (count - fewer - pp) / pp


def stage_seconds(work: Work, layouts: Layouts, index: int, passes: MicroBatchSeconds) -> tuple[Floats, Floats, Floats]:
    """Forward, input backward and weight backward of each stage of one layout; ``[stages]``."""
    stages, virtual = int(layouts.pp[index] * layouts.virtual[index]), int(layouts.virtual[index])
    layers = np.array(stage_counts(work.spec.layers, stages, int(layouts.last_fewer[index])), float)
    forward = layers * passes.layer_forward[index] + passes.host[index] / virtual
    given = layers * passes.layer_input[index]
    forward[0] += passes.embedding[index] / 3
    given[0] += passes.embedding[index] * 2 / 3
    forward[-1] += passes.head_forward[index]
    given[-1] += passes.head_backward[index] / 2
    weight = layers * passes.layer_weight[index]
    weight[-1] += passes.head_backward[index] / 2
    # The first stage needs no input gradient, and one that recomputes itself would do so for each half: both whole.
    whole = slice(None) if int(layouts.recompute[index]) == _FULL else slice(0, 1)
    given[whole] += weight[whole]
    weight[whole] = 0.0
    return forward, given, weight
