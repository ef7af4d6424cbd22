"""What the user left open, filled: the number of ranks, data-parallel degree, micro-batch size."""

from __future__ import annotations

import math

from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.job.schedule_rules import micro_batch_rule, micro_steps
from meshwright.job.validate import problems

_TOKENS_PER_MICRO_BATCH = 16384
"""Above this many tokens a larger micro-batch no longer makes the matrix products faster."""
_TOKENS_OF_OVERHEAD = 256
"""What starting one more micro-batch costs, in tokens of work: small ones are worth avoiding, not at any price."""


def resolve(job: Job, ranks: int | None, ranks_from: str, purpose: str) -> Job:
    """See :meth:`Job.resolve`."""
    if ranks is None and job.cluster.ranks is not None:
        ranks, ranks_from = job.cluster.ranks, job.source("cluster.ranks")
    layout = job.layout
    if ranks is not None and not {"dp", "tp", "pp", "cp"} & layout.model_fields_set:
        layout = layout.model_copy(update={"dp": ranks})
    if layout.micro_batch is None:
        layout = layout.model_copy(update={"micro_batch": choose_micro_batch(job, layout)})
    resolved = job.model_copy(
        update={
            "layout": layout,
            "model": job.model.model_copy(update={"preset": None, "hf": None}),
        }
    )
    resolved._sources = dict(job._sources)
    for key in ("dp", "micro_batch"):
        if getattr(layout, key) != getattr(job.layout, key):
            resolved._sources[f"layout.{key}"] = "chosen"
    wrong = problems(resolved, ranks, ranks_from, purpose)
    if wrong:
        raise InputError("\n".join(wrong))
    return resolved


def choose_micro_batch(job: Job, layout: Layout) -> int:
    """A legal micro-batch size, in sequences: the one with the least work and idle time, by a rough count.

    In deterministic mode it does not depend on ``dp``, since all ``dp`` must cut the batch alike. When
    no size is legal, the check that follows says why.
    """
    sequence, size = job.data.sequence_length, job.batch.global_size
    share = -(-size // layout.dp)
    largest = min(share, max(1, _TOKENS_PER_MICRO_BATCH // sequence))
    unit = layout.tp // math.gcd(sequence, layout.tp)
    if job.train.deterministic:
        return unit
    fitting = range(unit, share + 1, unit)

    def cost(number: int) -> tuple[float, int]:
        steps = micro_steps(size, number, layout.dp)
        idle = (layout.pp - 1) / layout.virtual_stages
        return (number * sequence + _TOKENS_OF_OVERHEAD) * (steps + idle), -number

    def runs(number: int) -> bool:
        steps = micro_steps(size, number, layout.dp)
        return micro_batch_rule(layout.schedule, layout.pp, layout.virtual_stages, steps) is None

    legal = [number for number in fitting if runs(number)]
    return min([number for number in legal if number <= largest] or legal or fitting or [unit], key=cost)
