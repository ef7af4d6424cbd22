"""Predicted against measured step times on this machine: `python -m bench.closed_loop`.

Calibrates (or takes a cluster file), predicts every layout with the planner, measures each in interleaved rounds, and
compares. What is predicted was never measured by the calibration: it knows kernels, single steps of other models on
one core, and collectives.

Only one set of rank processes lives at a time, because the transport threads of sleeping ones cost turns, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import machine
from meshwright.job.cluster import ClusterSpec, load_cluster
from meshwright.job.job import Job, job_from_values, load_job
from meshwright.job.layout_text import parse_layout_values
from meshwright.plan.arrays import Evaluation, Work, from_layouts
from meshwright.plan.evaluate import evaluate
from meshwright.prove.calibrate import calibrate
from meshwright.prove.calibrate_program import step_times
from meshwright.prove.pool import RankPool
from meshwright.prove.stopwatch import Timing

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.toml"
MEDIAN_ERROR, SPEARMAN, PICK = 0.12, 0.90, 1.05
"""The bars: median relative error, rank correlation, the pick's measured time over the best measured one."""

_LLAMA = {"vocabulary": 512, "hidden": 128, "layers": 4, "heads": 4, "ffn_hidden": 384, "max_positions": 128}
_GPT = {
    "vocabulary": 2048, "hidden": 192, "layers": 6, "heads": 6, "ffn_hidden": 768, "max_positions": 128,
    "positions": "learned", "norm": "layernorm", "activation": "gelu_tanh", "gated": False, "tied": True,
}  # fmt: skip
_WIDE = {"vocabulary": 1024, "hidden": 512, "layers": 4, "heads": 8, "kv_heads": 4, "ffn_hidden": 1024}

MODELS: dict[str, tuple[dict[str, Any] | None, int, int]] = {
    "quickstart": (None, 256, 8),
    "small llama": (_LLAMA, 128, 12),
    "small gpt": (_GPT, 128, 8),
    "wide llama": (_WIDE, 64, 8),
}
"""Sizes (None: the example's), sequence, global batch."""

LAYOUTS: dict[str, tuple[str, ...]] = {
    "quickstart": (
        "micro_batch=2",
        "dp=2 micro_batch=4",
        "dp=2 micro_batch=1",
        "dp=2 zero=1 micro_batch=2",
        "dp=2 zero=2 micro_batch=2",
        "dp=2 zero=3 micro_batch=2",
        "tp=2 micro_batch=4",
        "pp=2 schedule=gpipe micro_batch=1",
        "pp=2 schedule=1f1b micro_batch=1",
        "pp=2 schedule=interleaved micro_batch=1",
        "pp=2 schedule=zero-bubble micro_batch=1",
        "dp=2 tp=2 micro_batch=4",
        "dp=2 pp=2 micro_batch=1",
        "pp=4 micro_batch=1",
        "dp=4 micro_batch=2",
        "dp=4 zero=3 micro_batch=2",
        "dp=2 recompute=full micro_batch=2",
    ),
    "small llama": ("micro_batch=4", "dp=2 micro_batch=6", "dp=3 micro_batch=4", "dp=4 zero=1 micro_batch=3",
                    "tp=2 micro_batch=6", "tp=4 micro_batch=6", "pp=2 micro_batch=2"),
    "small gpt": ("micro_batch=2", "dp=2 zero=1 micro_batch=4", "tp=2 pp=2 micro_batch=2",
                  "pp=2 schedule=zbv micro_batch=1", "dp=2 recompute=full micro_batch=4"),
    "wide llama": ("micro_batch=4", "dp=2 micro_batch=4", "dp=2 zero=3 micro_batch=4", "tp=2 micro_batch=8",
                   "pp=2 micro_batch=2"),
}  # fmt: skip


@dataclass
class Case:
    """One layout of one model."""

    model: str
    layout: str
    job: Job
    predicted: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    """Seconds of a step, one a round."""

    @property
    def measured(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.samples)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def cases(models: Sequence[str]) -> list[Case]:
    """Every layout of the named models."""
    return [Case(model, layout, job_of(model, layout)) for model in models for layout in LAYOUTS[model]]


def job_of(model: str, layout: str) -> Job:
    """A case as a resolved job."""
    sizes, sequence, batch = MODELS[model]
    if sizes is None:
        return load_job(QUICKSTART, [], layout).resolve()
    values = parse_layout_values(layout)
    return job_from_values(
        {
            "model": {"max_positions": sequence, **sizes},
            "data": {"sequence_length": sequence, "train": "made up as we go"},
            "batch": {"global_size": batch},
            "optimizer": {"name": "adamw", "clip_norm": 1.0},
            "layout": values,
            "cluster": {"device": "cpu"},
        }
    ).resolve()


def predict(found: Sequence[Case], cluster: ClusterSpec) -> None:
    """Fill in what the planner says."""
    for model in dict.fromkeys(case.model for case in found):
        mine = [case for case in found if case.model == model]
        work = Work.of(mine[0].job)
        answer: Evaluation = evaluate(work, cluster, from_layouts([case.job.layout for case in mine], work))
        for index, case in enumerate(mine):
            case.predicted = float(answer.step_time[index])
            case.parts = {name: float(part[index]) for name, part in answer.time.items() if part[index] > 0}


def measure(found: Sequence[Case], rounds: int, steps: int, say: Callable[[str], None]) -> None:
    """Rounds over all cases; within a round those of as many ranks share their processes."""
    for turn in range(rounds):
        began = time.perf_counter()
        for ranks in sorted({case.job.layout.ranks for case in found}):
            pool = RankPool(ranks)
            try:
                for case in found:
                    if case.job.layout.ranks == ranks:
                        replies = pool.run(step_times, case.job, steps, timeout=300.0)
                        case.samples.append(max(statistics.median(times) for times in replies))
            finally:
                pool.close()
        say(f"round {turn + 1} of {rounds}: {time.perf_counter() - began:.0f} s")


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation (Spearman 1904), without ties."""
    first, second = (np.argsort(np.argsort(values)) for values in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


@dataclass(frozen=True)
class Verdict:
    """What the comparison shows."""

    layouts: int
    median_error: float
    p90_error: float
    bias: float
    spearman: float
    picks: dict[str, float]
    """By model: measured time of the layout predicted to be fastest, over the fastest measured."""

    @property
    def passed(self) -> bool:
        """All three bars."""
        return self.median_error <= MEDIAN_ERROR and self.spearman >= SPEARMAN and max(self.picks.values()) <= PICK


def judge(found: Sequence[Case]) -> Verdict:
    """Over all cases; the pick by model."""
    errors = [case.error for case in found]
    picks = {}
    for model in dict.fromkeys(case.model for case in found):
        mine = [case for case in found if case.model == model]
        picked = min(mine, key=lambda case: case.predicted)
        picks[model] = picked.measured / min(case.measured for case in mine)
    return Verdict(
        layouts=len(found),
        median_error=float(np.median(np.abs(errors))),
        p90_error=float(np.quantile(np.abs(errors), 0.9)),
        bias=float(np.median(errors)),
        spearman=spearman([case.predicted for case in found], [case.measured for case in found]),
        picks=picks,
    )


def table(found: Sequence[Case], verdict: Verdict) -> str:
    """All of it as text."""
    lines = [f"{'model':<12} {'layout':<42} ranks  predicted   measured   error  quartiles"]
    for case in found:
        timing = Timing.of(case.samples)
        lines.append(
            f"{case.model:<12} {case.layout:<42} {case.job.layout.ranks:>5}  {1e3 * case.predicted:>6.0f} ms  "
            f"{1e3 * case.measured:>6.0f} ms  {case.error:>+6.1%}  {timing.spread:.0%}"
        )
    picks = ", ".join(f"{model} {ratio:.3f}" for model, ratio in verdict.picks.items())
    lines += [
        f"{verdict.layouts} layouts: median error {verdict.median_error:.1%} (bar {MEDIAN_ERROR:.0%}), 90th percentile "
        f"{verdict.p90_error:.1%}, bias {verdict.bias:+.1%}",
        f"Spearman {verdict.spearman:.3f} (bar {SPEARMAN:.2f})",
        f"the pick over the best measured: {picks} (bar {PICK:.2f})",
        "passed" if verdict.passed else "NOT PASSED",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: within all bars; 1: not."""
    parser = argparse.ArgumentParser(description="Predicted against measured step times on this machine.")
    parser.add_argument("--cluster", help="a cluster file instead of calibrating")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps measured in a round, after two that are not")
    parser.add_argument("--effort", type=float, default=1.0, help="of the calibration")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output; progress on error")
    options = parser.parse_args(arguments)
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

    load = os.getloadavg()[0]
    if load > 0.5 * len(os.sched_getaffinity(0)):
        say(f"load average {load:.1f}: other work takes cores away, so neither side will be right")
    found = cases(options.models)
    ranks = max(case.job.layout.ranks for case in found)
    cluster = load_cluster(options.cluster) if options.cluster else calibrate(ranks, say, effort=options.effort)
    predict(found, cluster)
    measure(found, options.rounds, options.steps, say)
    verdict = judge(found)
    if options.json:
        rows = [
            {
                "model": case.model, "layout": case.layout, "ranks": case.job.layout.ranks,
                "predicted_step_time_s": case.predicted, "measured_step_time_s": case.measured,
                "rounds_s": case.samples, "error": case.error, "predicted_parts_s": case.parts,
            }
            for case in found
        ]  # fmt: skip
        overall = {**vars(verdict), "passed": verdict.passed}
        print(json.dumps({"machine": machine(), "cluster": cluster.model_dump(), "rows": rows, "overall": overall}))
    else:
        print(table(found, verdict))
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
