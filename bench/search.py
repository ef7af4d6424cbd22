"""How fast the search is and how good its pick: `python -m bench.search`.

1. Speed: a trillion parameters on 4,096 GPUs, the whole space, one core. A counted layout is distinct and legal, and
   its memory and step time were computed; those that broke a rule are counted apart.
2. Pick: where a space is small enough to time every layout that fits by event simulation, how much slower the
   search's pick is (closed form for all, simulation for the best 200 of them) than the best of all.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from dataclasses import asdict, dataclass

import numpy as np

from meshwright.job.cluster import ClusterSpec, load_cluster
from meshwright.job.presets import preset
from meshwright.plan.arrays import Floats, Layouts, Work, to_layout
from meshwright.plan.evaluate import evaluate
from meshwright.plan.refine import refine
from meshwright.plan.search import KEPT, search
from meshwright.plan.space import Counts, Space

_SAMPLE = 20_000
Problem = tuple[str, str, int, int]
LARGE: Problem = ("megatron-1t", "512x8 A100-SXM4-80GB", 3072, 2048)
"""Model, cluster, sequences of a step, tokens of a sequence."""
SMALL: tuple[Problem, ...] = (
    ("llama3-8b", "1x8 A100-SXM4-40GB", 16, 4096),
    ("gpt3-175b", "16x8 A100-SXM4-80GB", 128, 2048),
    LARGE,
)
"""The last two are too large to simulate whole: of their layouts that fit, every so many-th is taken."""


@dataclass(frozen=True)
class Speed:
    """One whole search."""

    layouts: int
    illegal: int
    fitting: int
    seconds: float
    cpu_seconds: float
    layouts_per_second: float
    refine_seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Pick:
    """The search's pick against simulating everything."""

    problem: str
    layouts: int
    fitting: int
    pick: str
    pick_seconds: float
    best: str
    best_seconds: float
    excess: float
    """``pick_seconds / best_seconds - 1``."""
    simulate_all_seconds: float


def speed(problem: Problem) -> Speed:
    """Search a whole space; one core."""
    work, space, cluster = _setting(problem)
    began, cpu = time.monotonic(), time.process_time()
    found = search(space, cluster)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    again = time.process_time()
    refine(work, cluster, found.best.layouts)
    return Speed(
        layouts=found.counts.legal,
        illegal=sum(found.counts.illegal.values()),
        fitting=sum(result.fitting for result in found.families),
        seconds=seconds,
        cpu_seconds=cpu,
        layouts_per_second=found.counts.legal / cpu,
        refine_seconds=time.process_time() - again,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def pick(problem: Problem) -> Pick:
    """Simulate every layout that fits, and see what the search would have taken of them."""
    work, space, cluster = _setting(problem)
    counted, fitting, closed = _fitting(work, space, cluster)
    began = time.process_time()
    simulated = refine(work, cluster, fitting)
    seconds = time.process_time() - began
    kept = np.argsort(closed, kind="stable")[:KEPT]
    chosen, best = int(kept[np.argmin(simulated[kept])]), int(np.argmin(simulated))
    layers = work.spec.layers
    return Pick(
        problem=f"{problem[0]} on {problem[1]}",
        layouts=counted,
        fitting=len(fitting),
        pick=_short(fitting, chosen, layers),
        pick_seconds=float(simulated[chosen]),
        best=_short(fitting, best, layers),
        best_seconds=float(simulated[best]),
        excess=float(simulated[chosen] / simulated[best]) - 1,
        simulate_all_seconds=seconds,
    )


def _setting(problem: Problem) -> tuple[Work, Space, ClusterSpec]:
    name, machines, batch, sequence = problem
    cluster = load_cluster(machines)
    work = Work(spec=preset(name), sequence=sequence, global_batch=batch)
    return work, Space(work, cluster.devices, cluster.devices_per_node), cluster


def _fitting(work: Work, space: Space, cluster: ClusterSpec) -> tuple[int, Layouts, Floats]:
    """How many layouts there are, and those that fit with their step times: all, or evenly ``_SAMPLE`` of them."""
    counts, parts, times = Counts(), [], []
    for family in space.families():
        for chunk in space.chunks(family, counts):
            values = evaluate(work, cluster, chunk)
            parts.append(chunk.take(values.fits))
            times.append(values.step_time[values.fits])
    layouts, closed = Layouts.join(parts), np.concatenate(times)
    if counts.legal > 2 * _SAMPLE:
        which = np.linspace(0, len(layouts) - 1, min(_SAMPLE, len(layouts))).astype(int)
        return counts.legal, layouts.take(which), closed[which]
    return counts.legal, layouts, closed


def _short(layouts: Layouts, index: int, layers: int) -> str:
    words = str(to_layout(layouts, index, layers)).split()
    return " ".join(word for word in words if not word.startswith(("placement=", "stages=")))


def main() -> None:
    """Print both tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--speed-only", action="store_true", help="leave the second part out")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    fast = speed(LARGE)
    if not options.json:
        _show_speed(fast)
    picks = []
    for problem in () if options.speed_only else SMALL:
        picks.append(pick(problem))
        if not options.json:
            _show_pick(picks[-1])
    if options.json:
        print(json.dumps({"speed": asdict(fast), "picks": [asdict(each) for each in picks]}))


def _show_speed(fast: Speed) -> None:
    print(
        f"{LARGE[0]} on {LARGE[1]}: {fast.layouts:,} layouts ({fast.fitting:,} fit, {fast.illegal:,} more broke a rule)"
        f" in {fast.cpu_seconds:.1f} s of one core ({fast.seconds:.1f} s wall): {fast.layouts_per_second:,.0f} "
        f"layouts/s; best {KEPT} simulated in {fast.refine_seconds:.1f} s; {fast.peak_memory_bytes / 1e6:,.0f} MB",
        flush=True,
    )


def _show_pick(each: Pick) -> None:
    print(
        f"{each.problem}: {each.fitting:,} simulated of {each.layouts:,} in {each.simulate_all_seconds:.0f} s; "
        f"pick {each.pick_seconds:.4f} s ({each.pick}), best {each.best_seconds:.4f} s ({each.best}): "
        f"{each.excess:.2%} slower",
        flush=True,
    )


if __name__ == "__main__":
    main()
