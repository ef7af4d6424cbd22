"""Which layouts a job may run, for whole arrays of them: the rules of ``Job.resolve(purpose="plan")`` as masks.

``job/validate.py`` says the same of one layout in sentences; a test draws layouts at random and holds the two
against each other in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.job.job import Job
from meshwright.job.layout import DELAYED_SCHEDULES, LOOPED_SCHEDULES, SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES, Layout
from meshwright.job.schedule_rules import ROUND_SCHEDULES
from meshwright.job.sync_section import SyncSection
from meshwright.job.validate_less_often import apart
from meshwright.job.validate_sync import sync_problems
from meshwright.plan.arrays import SCHEDULES, Bools, Layouts, Work

RULES: tuple[str, ...] = (
    "legal",
    "tp must divide the key/value heads",
    "tp must divide ffn_hidden",
    "a schedule or virtual stages need pp of at least 2",
    "virtual stages must fit the schedule",
    "no more stages than layers",
    "the last stage cannot give up more layers than it has",
    "a micro-batch is at most the global batch",
    "tp must divide the tokens of a micro-batch",
    "the schedule needs more micro-batches",
    "micro-batches must divide into rounds of the schedule",
    "shard must divide dp",
    "shard below dp needs zero of at least 1",
    "zero=3 loses gradients when backward is split",
    "deterministic sums need zero below 2 with shard below dp or pp above 1",
    "compile needs tp=1",
    "compile needs a schedule that does not split backward",
    "workers of servers need tp=1, pp=1 and zero=0",
    "replicas that train apart must be at least two",
    "compression needs dp of at least 2",
    "two versions of the parameters need zero below 2",
    "two versions of the parameters need an untied embedding, no float16, no compile and plain sums",
    "what [sync] asks for must go with the layout",
)
"""``first_broken_rule`` counts in this order; 0 is legal."""


@dataclass(frozen=True)
class Modes:
    """What a job asks for besides the work that forbids or adds some layouts."""

    deterministic: bool = False
    compile: bool = False
    servers: bool = False
    apart: bool = False
    """Replicas meet now and then."""
    compressed: bool = False
    asking: Job | None = None
    """The job, where its [sync] asks for more than plain sums: its own rules say which degrees go with that."""
    delayed: bool = False
    """Search schedules that take each gradient one update late, too: they train another model."""

    @property
    def unlike(self) -> bool:
        """Gradients are not plainly summed in every step."""
        return self.servers or self.apart or self.compressed

    @classmethod
    def of(cls, job: Job) -> Modes:
        """A job's."""
        return cls(
            deterministic=job.train.deterministic,
            compile=job.train.compile,
            servers=job.sync.strategy == "server",
            apart=apart(job),
            compressed=job.sync.compression != "none",
            asking=None if job.sync == SyncSection() else job,
        )


def _is(names: frozenset[str]) -> NDArray[np.bool_]:
    return np.array([schedule in names for schedule in SCHEDULES])


_LOOPED, _FOLDED = _is(LOOPED_SCHEDULES), _is(V_SCHEDULES)
_DELAYED = _is(DELAYED_SCHEDULES)
_SPLIT, _ROUNDS = _is(SPLIT_BACKWARD_SCHEDULES), _is(ROUND_SCHEDULES)
_PLAIN_SCHEDULE = SCHEDULES.index("1f1b")
_FEWEST_IN_PP = np.array([{"1f1b": 1, "2bw": 1, "dualpipev": 2}.get(schedule, 0) for schedule in SCHEDULES])
"""Fewest micro-batches of a schedule, in pipeline ranks; 0: one will do."""


def broken_rules(work: Work, layouts: Layouts, modes: Modes = Modes()) -> dict[int, Bools]:
    """For each rule (index into ``RULES``) which layouts break it.

    The degrees, sizes and counts of ``layouts`` are positive, and ``micro_batches`` follows from the batch.
    """
    each, spec = layouts, work.spec
    piped = each.pp > 1
    virtual = np.where(piped, each.virtual, 1)
    stages = np.where(piped, each.pp * virtual, 1)
    looped, folded, split = _LOOPED[each.schedule], _FOLDED[each.schedule], _SPLIT[each.schedule]
    delayed = piped & _DELAYED[each.schedule]
    rounds = np.maximum(1, each.micro_batches // each.pp)
    sharded = each.shard < each.dp
    wrong_stages = np.where(folded, virtual != 2, ~looped & (virtual != 1))
    return {
        1: spec.kv_heads % each.tp != 0,
        2: spec.ffn_hidden % each.tp != 0,
        3: ~piped & ((each.virtual > 1) | (each.schedule != _PLAIN_SCHEDULE)),
        4: piped & wrong_stages,
        5: stages > spec.layers,
        6: (each.last_fewer > 0) & ((stages == 1) | (each.last_fewer > spec.layers // stages)),
        7: each.micro_batch > work.global_batch,
        8: each.micro_batch * work.sequence % each.tp != 0,
        9: piped & (each.micro_batches < _FEWEST_IN_PP[each.schedule] * each.pp),
        10: piped & _ROUNDS[each.schedule] & (each.micro_batches % rounds != 0),
        11: each.dp % each.shard != 0,
        12: sharded & (each.zero == 0),
        13: piped & split & (each.zero == 3),
        14: modes.deterministic & (each.zero >= 2) & (sharded | piped),
        15: modes.compile & (each.tp > 1),
        16: modes.compile & piped & split,
        17: modes.servers & ((each.tp > 1) | piped | (each.zero > 0)),
        18: modes.apart & np.where(each.zero > 0, ~sharded, each.dp < 2),
        19: modes.compressed & (each.dp < 2),
        20: delayed & (each.zero >= 2) & (each.shard > 1),
        21: delayed & (spec.tied or work.dtype == "float16" or modes.compile or modes.unlike),
        22: np.zeros(len(each), bool) if modes.asking is None else _refused(modes.asking, each),
    }


def _refused(job: Job, layouts: Layouts) -> Bools:
    """Where the job's rules of [sync] refuse the degrees: asked once for each combination of them."""
    degrees = np.stack([layouts.dp, layouts.tp, layouts.pp, layouts.zero, layouts.shard], axis=1)
    found, inverse = np.unique(degrees, axis=0, return_inverse=True)
    refused = np.array([_sync_refuses(job, *(int(degree) for degree in row)) for row in found], bool)
    return refused[inverse.ravel()]


@lru_cache(maxsize=1 << 14)
def _sync_refuses(job: Job, dp: int, tp: int, pp: int, zero: int, shard: int) -> bool:
    layout = Layout.model_validate({"dp": dp, "tp": tp, "pp": pp, "zero": zero, "shard": shard if zero else None})
    return next(iter(sync_problems(job.with_layout(layout))), None) is not None


def first_broken_rule(work: Work, layouts: Layouts, modes: Modes = Modes()) -> NDArray[np.int64]:
    """The first of ``RULES`` that each layout breaks; 0 where it is legal."""
    first = np.zeros(len(layouts), np.int64)
    for rule, broken in reversed(broken_rules(work, layouts, modes).items()):
        first[broken] = rule
    return first
