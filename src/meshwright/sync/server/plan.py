"""What the job says to the coordinator of a parameter server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.sync.server.staleness import Rule


@dataclass(frozen=True)
class Plan:
    """What the job says.

    Attributes:
        shards: how many.
        replicas: of each shard at the start.
        workers: how many workers a step is cut for.
        awaited: indices of workers without whom no work is handed out before they have come for the first time.
        pushes: updates that make a step: 1, or in asynchronous mode as many as workers.
        begin, steps: steps done before, and in all.
        rate: learning rate by step.
        clip_norm: largest global gradient norm, or None.
        stop_on_nonfinite: otherwise such an update is skipped.
        staleness: rule of the rate's factor.
        barriers: the steps after which all workers pause, in order: to validate, to save, to end.
        evaluate_at, save_at: which of them.
        timeout: seconds without a sign of life after which a worker or a replica is taken for dead.
    """

    shards: int
    replicas: int
    workers: int
    pushes: int
    begin: int
    steps: int
    rate: Callable[[int], float]
    clip_norm: float | None = None
    stop_on_nonfinite: bool = True
    staleness: Rule = "none"
    evaluate_at: frozenset[int] = frozenset()
    save_at: frozenset[int] = frozenset()
    timeout: float = 10.0
    awaited: frozenset[int] = frozenset()

    def barrier_after(self, step: int) -> int:
        """The next step after which all workers pause."""
        return min([each for each in self.evaluate_at | self.save_at if each > step] + [self.steps])
