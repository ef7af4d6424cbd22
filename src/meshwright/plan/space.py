"""Every layout there is for some devices, as columns, in chunks: distinct, legal and counted.

A *family* is one factorisation ``dp * tp * pp`` of the devices. Inside it a layout is one choice from each of five
lists: the pipeline's program (schedule, virtual stages, layers the last stage gives up), the micro-batch size, the
ZeRO stage with its shard degree, the recomputation, and the order of the axes over the devices of a node. Layouts
are numbered through, and numbers become columns by arithmetic: nothing here loops over layouts.

A schedule that takes each gradient one update late (``2bw``) changes what is trained, so it is tried only where that
was asked for. Left out, since each does exactly what another layout does:

* one virtual stage under ``interleaved`` and ``looped-bfs`` (``1f1b`` and ``gpipe``);
* ZeRO over one rank, and shard degree 1 (``zero=0``);
* of two micro-batch sizes that give equally many micro-batches the larger one, which only adds padding;
* axis orders that put every rank on the same device, or that differ only inside one node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from meshwright.job.layout import DELAYED_SCHEDULES, V_SCHEDULES
from meshwright.plan.arrays import ORDERS, RECOMPUTES, SCHEDULES, Ints, Layouts, Work, axis_strides
from meshwright.plan.legality import RULES, Modes, first_broken_rule

CHUNK = 1 << 15
"""Layouts handed out at a time: columns of them stay in a core's cache."""


@dataclass(frozen=True, order=True)
class Family:
    """The degrees that all its layouts share."""

    pp: int
    tp: int
    dp: int

    def __str__(self) -> str:
        return f"dp={self.dp} tp={self.tp} pp={self.pp}"


@dataclass
class Counts:
    """What was walked through so far."""

    legal: int = 0
    """Layouts handed out."""
    illegal: Counter[tuple[Family, str]] = field(default_factory=Counter)
    """Layouts left out, by family and rule."""


@dataclass(frozen=True)
class Space:
    """All layouts of some work on ``devices`` devices, ``node`` of them on each node."""

    work: Work
    devices: int
    node: int
    modes: Modes = field(default_factory=Modes)

    def families(self) -> list[Family]:
        """Every factorisation of the devices, legal or not."""
        return [
            Family(pp=pp, tp=tp, dp=self.devices // pp // tp)
            for pp in divisors(self.devices)
            for tp in divisors(self.devices // pp)
        ]

    def chunks(self, family: Family, counts: Counts, size: int = CHUNK) -> Iterator[Layouts]:
        """The legal layouts of one family, at most ``size`` at a time; ``counts`` is kept up to date."""
        rule = self._family_rule(family)
        if rule:
            counts.illegal[family, RULES[rule]] += 1
            return
        programs, batches, sharding = self._programs(family), self._micro_batches(family), self._sharding(family)
        shape = (len(programs), len(batches), len(sharding))
        for low in range(0, math.prod(shape), size):
            at = np.unravel_index(np.arange(low, min(low + size, math.prod(shape))), shape)
            bare = self._columns(family, programs[at[0]], batches[at[1]], sharding[at[2]])
            broken = first_broken_rule(self.work, bare, self.modes)
            variants = len(RECOMPUTES) * self._distinct_orders(bare).sum(axis=0)
            for number in np.unique(broken[broken > 0]):
                counts.illegal[family, RULES[number]] += int(variants[broken == number].sum())
            yield from self._variants(bare.take(broken == 0), counts, size)

    def size(self) -> Counts:
        """How many layouts there are, by walking through all."""
        counts = Counts()
        for family in self.families():
            for _ in self.chunks(family, counts):
                pass
        return counts

    def _family_rule(self, family: Family) -> int:
        """The rule that forbids a whole family, 0 when none does."""
        degrees = Layouts.make(dp=family.dp, tp=family.tp, pp=family.pp, micro_batches=1)
        broken = first_broken_rule(self.work, degrees, Modes(compile=self.modes.compile))
        # What depends on the micro-batch or the schedule is not the family's.
        rule = int(broken[0])
        return rule if RULES[rule] in _OF_DEGREES else 0

    def _programs(self, family: Family) -> Ints:
        """Rows (schedule, virtual stages, layers the last stage gives up)."""
        if family.pp == 1:
            return np.array([[SCHEDULES.index("1f1b"), 1, 0]])
        rows = []
        for number, schedule in enumerate(SCHEDULES):
            if schedule in DELAYED_SCHEDULES and not self.modes.delayed:
                continue
            for virtual in self._virtual(schedule, family.pp):
                most = min(self.work.spec.layers // (family.pp * virtual), self.head_in_layers())
                rows += [[number, virtual, fewer] for fewer in range(most + 1)]
        return np.array(rows).reshape(-1, 3)

    def _virtual(self, schedule: str, pp: int) -> range:
        most = self.work.spec.layers // pp
        if schedule in V_SCHEDULES:
            return range(2, min(most, 2) + 1)
        if schedule in ("interleaved", "looped-bfs"):
            return range(2, most + 1)
        return range(1, most + 1) if schedule == "zero-bubble" else range(1, 2)

    def head_in_layers(self) -> int:
        """How many layers the head weighs, rounded up: the most the last stage may give up for it."""
        spec = self.work.spec
        layer = sum(math.prod(shape) for _, shape in spec.layer_parameters(0))
        return -(-spec.vocabulary * spec.hidden // layer)

    def _micro_batches(self, family: Family) -> Ints:
        """Rows (micro-batch size, micro-batches): the smallest size for each possible number of them."""
        parts = self.work.parts(family.dp)
        share = -(-self.work.global_batch // parts)
        unit = family.tp // math.gcd(self.work.sequence, family.tp)
        sizes = np.arange(unit, max(share, unit) + 1, unit)
        numbers = -(-self.work.global_batch // (sizes * parts))
        numbers, first = np.unique(numbers, return_index=True)
        return np.stack([sizes[first], numbers], axis=1)[::-1]

    def _sharding(self, family: Family) -> Ints:
        """Rows (zero, shard)."""
        groups = [degree for degree in divisors(family.dp) if degree > 1]
        return np.array([[0, family.dp], *([zero, degree] for zero in (1, 2, 3) for degree in reversed(groups))])

    def _columns(self, family: Family, programs: Ints, batches: Ints, sharding: Ints) -> Layouts:
        return Layouts.make(
            dp=family.dp,
            tp=family.tp,
            pp=family.pp,
            schedule=programs[:, 0],
            virtual=programs[:, 1],
            last_fewer=programs[:, 2],
            micro_batch=batches[:, 0],
            micro_batches=batches[:, 1],
            zero=sharding[:, 0],
            shard=sharding[:, 1],
        )

    def _distinct_orders(self, layouts: Layouts) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """[orders, layouts]: whether an axis order puts ranks on devices as no earlier one does."""
        extents = {"tp": layouts.tp, "shard": layouts.shard, "replicate": layouts.replicas, "pp": layouts.pp}
        strides = []
        for order in range(len(ORDERS)):
            by_axis = axis_strides(layouts.with_columns(order=np.int64(order)))
            strides.append(np.stack([np.where(extents[axis] > 1, by_axis[axis], 0) for axis in extents]))
        distinct = np.ones((len(ORDERS), len(layouts)), bool)
        for order in range(1, len(ORDERS)):
            for earlier in range(order):
                distinct[order] &= (strides[order] != strides[earlier]).any(axis=0)
        if self.devices <= self.node:
            distinct[1:] = False
        return distinct

    def _variants(self, bare: Layouts, counts: Counts, size: int) -> Iterator[Layouts]:
        """Each layout with every recomputation and every order of axes."""
        which, order = np.nonzero(self._distinct_orders(bare).T)
        policies = len(RECOMPUTES)
        for low in range(0, policies * len(which), size):
            at = np.arange(low, min(low + size, policies * len(which)))
            chunk = bare.take(which[at // policies])
            chunk = chunk.with_columns(order=order[at // policies], recompute=at % policies)
            counts.legal += len(chunk)
            yield chunk


_OF_DEGREES = frozenset(RULES[number] for number in (1, 2, 5, 15))
"""Rules that only the degrees decide."""


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})
