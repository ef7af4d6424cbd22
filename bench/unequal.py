"""Replicas of unequal speed: `python -m bench.unequal [--json] [--zero N] [--rounds N]`.

Three ranks on two cores: one has a core to itself, two share the other, so they run at half its speed. Equal shares of
the batch leave the first waiting; with shares 2:1:1 all end together, 4/3 times as fast. Blocks of steps with equal
and with automatic shares (`split = "auto"`) run in turn, so that what slows the machine slows both. Then the whole
core goes to another rank in the middle of the run, and the steps are counted until their time has settled. At last
the divisions that the run chose are run again in float64, and every gradient compared with one device.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.statistics import median, paired_ratio
from bench.unequal_ranks import contest
from meshwright.errors import InputError
from meshwright.job.job import Job, job_from_values
from meshwright.job.layout_text import parse_layout
from meshwright.prove.check import Prover
from meshwright.prove.matrix import Case
from meshwright.prove.pool import RankPool
from meshwright.prove.sync_cases_unequal import UnequalCase

LIMIT = 4 / 3
"""Speeds 2:1:1 with equal thirds take 2/3 of the slow rank's unit; shared by speed, 1/2."""
WITHIN = 0.1
"""A step has recovered when it, and the two after it, are this close to the settled ones."""
_SETTLE, _BLOCK, _AFTER = 16, 4, 40


def bench_job(zero: int, sequences: int = 24) -> Job:
    """Three data-parallel ranks of a model small enough for many steps, large enough that they compute."""
    values: dict[str, Any] = {
        "model": {"vocabulary": 512, "hidden": 192, "layers": 4, "heads": 4, "ffn_hidden": 512, "max_positions": 256},
        "data": {"train": ["none"], "sequence_length": 96},
        "batch": {"global_size": sequences, "split": "auto"},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "layout": f"dp=3 zero={zero} micro_batch=12",
        "cluster": {"device": "cpu"},
    }
    return job_from_values(values).resolve()


def recovered_after(seconds: Sequence[float]) -> int | None:
    """Steps until the step's time has come down to what it settles at (the median of the last ten); None: never."""
    settled = median(seconds[-10:])
    for step in range(len(seconds) - 2):
        if median(seconds[step : step + 3]) <= settled * (1 + WITHIN):
            return step
    return None


def gradients(job: Job, divisions: Sequence[Sequence[int]], zero: int, steps: int) -> dict[str, Any]:
    """The divisions of the run again, one after the other, in float64 against one device."""
    layout = parse_layout(f"dp=3 zero={zero} micro_batch=12")
    size = job.batch.global_size
    case = UnequalCase(Case("as the run divided", layout, global_size=size), (1, 1, 1))
    case = replace(case, sequences=tuple(tuple(one) for one in divisions))
    with Prover() as prover:
        verdict = prover.prove(case.request(job, "float64", "sgd", steps), case.case.label)
    return verdict.as_json()


def measure(zero: int, rounds: int) -> dict[str, Any]:
    """All figures.

    Raises:
        InputError: there are not two cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise InputError(f"bench: {len(cores)} core is not enough for ranks of unequal speed; give 2")
    whole, shared = cores[:2]
    places = ((whole, shared, shared), (shared, shared, whole))
    job = bench_job(zero)
    pool = RankPool(3)
    try:
        found = pool.run(contest, job, places, _SETTLE, rounds, _BLOCK, _AFTER, timeout=1500)[0]
    finally:
        pool.close()
    blocks = {kind: [median([step["seconds"] for step in one]) for one in found[kind]] for kind in ("equal", "auto")}
    ratio = paired_ratio(blocks["equal"], blocks["auto"])
    every = [*found["settling"], *(step for one in found["auto"] for step in one), *found["changed"]]
    divisions = list(dict.fromkeys(tuple(step["sequences"]) for step in every))
    changed = [step["seconds"] for step in found["changed"]]
    changed_equal = median([step["seconds"] for step in found["changed_equal"]])
    return {
        "zero": zero,
        "rounds": rounds,
        "cores": {"before": places[0], "after": places[1]},
        "equal_step_s": median(blocks["equal"]),
        "auto_step_s": median(blocks["auto"]),
        "speedup": {"median": ratio.median, "low": ratio.low, "high": ratio.high, "limit": LIMIT},
        "sequences": {"before": found["auto"][-1][-1]["sequences"], "after": found["changed"][-1]["sequences"]},
        "change": {
            "steps_to_recover": recovered_after(changed),
            "first_step_s": changed[0],
            "settled_step_s": median(changed[-10:]),
            "equal_step_s": changed_equal,
            "speedup": changed_equal / median(changed[-10:]),
            "resized_at": [
                [step + 1, found["changed"][step + 1]["sequences"]]
                for step in range(len(changed) - 1)
                if found["changed"][step]["sequences"] != found["changed"][step + 1]["sequences"]
            ],
        },
        "divisions": divisions,
        "gradients": gradients(job, divisions, zero, steps=min(10, max(2, len(divisions)))),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Automatic shares of the batch on replicas of unequal speed.")
    parser.add_argument("--zero", type=int, default=0, choices=range(4))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    found = measure(options.zero, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    speedup, change, exact = found["speedup"], found["change"], found["gradients"]
    print(
        f"equal {found['equal_step_s']:.3f} s a step, automatic {found['auto_step_s']:.3f} s "
        f"({':'.join(map(str, found['sequences']['before']))}): {speedup['median']:.3f} times as fast "
        f"[{speedup['low']:.3f}, {speedup['high']:.3f}], of at most {LIMIT:.3f}"
    )
    print(
        f"the whole core to another rank: {change['first_step_s']:.3f} s, after {change['steps_to_recover']} steps "
        f"{change['settled_step_s']:.3f} s ({':'.join(map(str, found['sequences']['after']))}), "
        f"{change['speedup']:.3f} times as fast as equal shares there"
    )
    print(
        f"{len(found['divisions'])} divisions again in float64: gradients within "
        f"{exact['max_relative_gradient_difference']:.1e} of one device, {'passed' if exact['passed'] else 'FAILED'}"
    )


if __name__ == "__main__":
    main()
