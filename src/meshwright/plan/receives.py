"""When a pipeline rank begins to receive: the buffer of a receive is there from then on.

On torch's runtime a receive is put behind what its rank has already been given to do when the sender's turn comes,
going round the ranks and giving each one action at a time, if what it needs has arrived. Where steps overlap
(``parallel/continuous.py``) it is posted one computation early.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from meshwright.job.layout import DELAYED_SCHEDULES
from meshwright.schedule.table import Action, Table, table

Receives = tuple[tuple[tuple[bool, int], ...], ...]
"""By number of actions done before: (whether it is a gradient, for which stage)."""


@lru_cache(maxsize=64)
def receives(schedule: str, pp: int, virtual: int, micro_batches: int) -> tuple[Receives, ...]:
    """For each pipeline rank."""
    if schedule in DELAYED_SCHEDULES:
        return tuple(_one_computation_early(pp, rank, micro_batches) for rank in range(pp))
    order = table(schedule, pp, virtual, micro_batches)
    return _Rounds(order).run()


def _one_computation_early(pp: int, rank: int, micro_batches: int) -> Receives:
    """Where steps overlap, of a steady step: before each computation, what the next of the other direction takes in."""
    inputs, gradients = rank > 0, rank < pp - 1
    posted: list[tuple[tuple[bool, int], ...]] = []
    for micro_batch in range(micro_batches):
        first = inputs and micro_batch == 0
        posted.append(((False, rank),) * first + ((True, rank),) * gradients)
        posted.append(((False, rank),) * (inputs and micro_batch + 1 < micro_batches))
    return (*posted, ())


class _Rounds:
    def __init__(self, order: Table) -> None:
        self._order, self._holder = order, order.rank_of_stage.tolist()
        self._turns = [list(_turns(order, rank)) for rank in range(order.pp)]
        self._next = [0] * order.pp
        self._done = [0] * order.pp
        self._here: list[set[tuple[bool, int, int]]] = [set() for _ in range(order.pp)]
        """By rank: inputs (False) and gradients (True) of (stage, micro-batch) that are there."""
        self._posted: list[list[list[tuple[bool, int]]]] = [
            [[] for _ in range(len(order.rows[rank]) + 1)] for rank in range(order.pp)
        ]

    def run(self) -> tuple[Receives, ...]:
        """Go round until every rank has had its turns."""
        waiting = set(range(self._order.pp))
        while waiting:
            before = list(self._next)
            for rank in sorted(waiting):
                turn = self._turns[rank][self._next[rank]]
                if all(self._ready(rank, action) for action in turn):
                    self._take(rank, turn)
                    if self._next[rank] == len(self._turns[rank]):
                        waiting.discard(rank)
            if before == self._next:
                raise ValueError(f"schedule {self._order.schedule}: no rank can go on")
        return tuple(tuple(map(tuple, posted)) for posted in self._posted)

    def _ready(self, rank: int, action: Action) -> bool:
        kind, stage, micro_batch = action
        if kind == "W" or (kind == "F" and stage == 0) or (kind != "F" and stage == self._order.stage_count - 1):
            return True
        return (kind != "F", stage, micro_batch) in self._here[rank]

    def _take(self, rank: int, turn: tuple[Action, ...]) -> None:
        self._next[rank] += 1
        self._done[rank] += len(turn)
        for kind, stage, micro_batch in turn:
            target = stage + 1 if kind == "F" else stage - 1
            if kind == "W" or not 0 <= target < self._order.stage_count:
                continue
            holder = self._holder[target]
            self._here[holder].add((kind != "F", target, micro_batch))
            if holder != rank:
                self._posted[holder][self._done[holder]].append((kind != "F", target))


def _turns(order: Table, rank: int) -> Iterator[tuple[Action, ...]]:
    """The actions of a rank; two that overlap are one turn."""
    row = order.rows[rank]
    held = order.held[order.starts[rank] : order.starts[rank + 1]].tolist()
    index = 0
    while index < len(row):
        count = 2 if held[index] else 1
        yield row[index : index + count]
        index += count
