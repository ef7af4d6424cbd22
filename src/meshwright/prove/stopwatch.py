"""Interleaved timing: each round runs every case once, so what slows the machine for a while slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Name = TypeVar("Name")


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    median: float
    low: float
    """Lower quartile."""
    high: float
    """Upper quartile."""

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Of at least one sample."""
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0])
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(middle, low, high)

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


def interleaved(
    cases: Mapping[Name, Callable[[], object]],
    seconds: float,
    *,
    device: torch.device | None = None,
    shortest: float = 1e-3,
    fewest_rounds: int = 5,
) -> dict[Name, Timing]:
    """Time every case for ``seconds`` in all.

    Args:
        cases: what to call, by name; each is called once before.
        seconds: rounds begin until then, but at least ``fewest_rounds``.
        device: where the cases compute; on CUDA by events, else by ``core_clock``.
        shortest: a case is repeated within a round until it takes about this long.
        fewest_rounds: however long they take.
    """
    once = _by_events if device is not None and device.type == "cuda" else _by_clock
    repeats = {name: _repeats(case, once, shortest) for name, case in cases.items()}
    samples: dict[Name, list[float]] = {name: [] for name in cases}
    deadline, rounds = time.perf_counter() + seconds, 0
    while rounds < fewest_rounds or time.perf_counter() < deadline:
        for name, case in cases.items():
            samples[name].append(once(case, repeats[name]))
        rounds += 1
    return {name: Timing.of(values) for name, values in samples.items()}


def _repeats(case: Callable[[], object], once: Callable[[Callable[[], object], int], float], shortest: float) -> int:
    once(case, 1)
    return max(1, round(shortest / max(once(case, 1), 1e-7)))


def core_clock() -> float:
    """Seconds this thread has had a core; with several computing threads, of the wall.

    What other processes take of the core meanwhile is then not charged to what is measured.
    """
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _by_clock(case: Callable[[], object], repeats: int) -> float:
    began = core_clock()
    for _ in range(repeats):
        case()
    return (core_clock() - began) / repeats


def _by_events(case: Callable[[], object], repeats: int) -> float:
    event: Any = torch.cuda.Event
    began, ended = event(enable_timing=True), event(enable_timing=True)
    began.record()
    for _ in range(repeats):
        case()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e-3 / repeats
