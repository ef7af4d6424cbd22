"""A small problem for parameter servers in one process: stores, gradients, and the replay of a run's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.sync.server.client import Gradient
from meshwright.sync.server.modes import Arrival, Clocked, Mode, Work
from meshwright.sync.server.plan import Plan
from meshwright.sync.server.rehearsal import Notes, Rehearsal

SIZE = 6
"""Elements of each shard."""


class SmallStore:
    """Momentum SGD on one small vector: what it holds depends on every update and on their order."""

    def __init__(self, start: Tensor, momentum: float = 0.5) -> None:
        self.master, self.buffer, self.momentum, self.updates = start.clone(), torch.zeros_like(start), momentum, 0
        self.gradient = torch.zeros_like(start)

    def values(self) -> list[Tensor]:
        return [self.master.clone()]

    def add_up(self, parts: Sequence[Sequence[Tensor]]) -> float:
        self.gradient = parts[0][0].clone()
        for part in parts[1:]:
            self.gradient += part[0]
        peak = float(self.gradient.abs().max())
        return math.inf if math.isnan(peak) else peak

    def squares(self, peak: float) -> tuple[float, float]:
        return (float((self.gradient**2).sum()), 0.0)

    def update(self, rate: float, factor: float) -> None:
        self.buffer = self.momentum * self.buffer + self.gradient * factor
        self.master = self.master - rate * self.buffer
        self.updates += 1

    def state(self) -> list[Tensor]:
        return [self.master, self.buffer]

    def restore(self, tensors: Sequence[Tensor], updates: int) -> None:
        self.master, self.buffer = (tensor.clone() for tensor in tensors)
        self.updates = updates


def start(shard: int) -> Tensor:
    return torch.linspace(-1, 1, SIZE, dtype=torch.float64) * (shard + 1)


def gradient_at(values: Sequence[Tensor], work: Work) -> list[Tensor]:
    """A gradient that depends on the parameters of all shards, on the samples and on the slot."""
    mix = torch.stack([value.sum() for value in values]).sum()
    place = work.first + 0.1 * work.slot
    return [torch.sin(value * 3 + place) + 0.01 * mix + 0.05 * value for value in values]


class Computing:
    def __init__(self, slow: Callable[[list[Tensor], Work], list[Tensor]] = gradient_at) -> None:
        self.parameters: list[Tensor] = []
        self.function = slow

    def load(self, shards: Sequence[Sequence[Tensor]]) -> None:
        self.parameters = [tensors[0].clone() for tensors in shards]

    def gradient(self, work: Work) -> Gradient:
        gradients = self.function(self.parameters, work)
        return Gradient([[each] for each in gradients], [float(work.first)], 10)

    def validate(self, part: int, parts: int) -> tuple[float, int]:
        return float(self.parameters[0].sum()), 1


def network(plan: Plan, mode: Mode, *, seed: int | None = 0, **changes: Any) -> Rehearsal:
    """Servers and workers of the small problem."""
    makers: dict[str, Any] = {"store": lambda shard: SmallStore(start(shard)), "compute": Computing, **changes}
    return Rehearsal(plan, mode, seed=seed, **makers)


def clocked(workers: int, *, bound: int = 0, enough: int | None = None, batch: int | None = None) -> Mode:
    size = batch or workers
    return Clocked(begin=0, cursor=0, slots=workers, workers=workers, batch=size, bound=bound, enough=enough)


def arrival(workers: int) -> Mode:
    return Arrival(begin=0, cursor=0, pushes=workers, batch=workers)


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "shards": 2, "replicas": 2, "workers": 2, "pushes": 1, "begin": 0, "steps": 4, "rate": lambda step: 0.1,
        "clip_norm": 1.0,
    }  # fmt: skip
    return Plan(**{**values, **changes})


def replay(notes: Notes, shards: int, workers_of: Callable[[int], Any] = lambda shard: SmallStore(start(shard))) -> Any:
    """The parameters that one process comes to, from the order of updates alone: gradients taken anew."""
    stores = [workers_of(shard) for shard in range(shards)]
    history = [[store.values()[0] for store in stores]]
    for update in notes.updates:
        read = [fact["versions"] for fact in update.facts]
        gradients = [
            gradient_at([history[version][shard] for shard, version in enumerate(versions)], work)
            for versions, work in zip(read, update.works, strict=True)
        ]
        for shard, store in enumerate(stores):
            store.add_up([[gradient[shard]] for gradient in gradients])
            if update.factor is not None:
                store.update(update.rate, update.factor)
        history.append([store.values()[0] for store in stores])
    return stores
