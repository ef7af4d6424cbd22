"""The layouts others found best by measuring, against the planner's picks: `python -m bench.picks`.

Each row is planned twice. With *their program* (its memory and time rules, its choices: ZeRO, schedules,
recomputation) the pick should be theirs, or theirs only little slower: that tests the planner. With *this program*
the pick may differ, because it has choices theirs had not: that is what they would gain. Both are predictions.
The table is Markdown; docs/reference/picks.md holds it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.published_programs import MEGATRON_2021
from meshwright.job.cluster import ClusterSpec, load_cluster
from meshwright.job.model_spec import ModelSpec
from meshwright.job.presets import preset
from meshwright.plan.arrays import RECOMPUTES, SCHEDULES, Bools, Evaluation, Layouts, Work, to_layout
from meshwright.plan.evaluate import evaluate
from meshwright.plan.rules import OURS, Rules
from meshwright.plan.space import Counts, Family, Space

FILE = Path(__file__).parent / "best_layouts.json"
_SAME = 0.01
"""Step times closer than this are alike: the planner's own error is larger."""


@dataclass(frozen=True)
class Program:
    """What a program could choose from."""

    rules: Rules | None
    """None: meshwright's own."""
    allows: Callable[[Layouts], Bools]
    sequence_parallel: bool = True
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Best:
    """The fastest layout of a family that fits."""

    layout: str
    seconds: float
    time: dict[str, float]


def _megatron(layouts: Layouts) -> Bools:
    """No sharded state, everything recomputed, one pipeline schedule and its interleaved form, even stages."""
    schedules = np.isin(layouts.schedule, [SCHEDULES.index("1f1b"), SCHEDULES.index("interleaved")])
    plain = (layouts.last_fewer == 0) & (layouts.order == 0)
    chosen: Bools = (layouts.zero == 0) & (layouts.recompute == RECOMPUTES.index("full")) & schedules & plain
    return chosen


def _figure_13(layouts: Layouts) -> Bools:
    """One replica, one schedule, one sequence at a time."""
    chosen: Bools = _megatron(layouts) & (layouts.dp == 1) & (layouts.micro_batch == 1) & (layouts.virtual == 1)
    return chosen


def _nanotron(layouts: Layouts) -> Bools:
    """ZeRO-1 at most, nothing recomputed, 1F1B or all-forward-all-backward, even stages.

    None of the 26 best layouts there is plain data parallel, and nothing says that it was run: it is left out.
    """
    schedules = np.isin(layouts.schedule, [SCHEDULES.index("1f1b"), SCHEDULES.index("gpipe")])
    plain = (layouts.last_fewer == 0) & (layouts.order == 0) & (layouts.shard == layouts.dp)
    plain &= layouts.tp * layouts.pp > 1
    chosen: Bools = (layouts.zero <= 1) & (layouts.recompute == RECOMPUTES.index("none")) & schedules & plain
    return chosen


NANOTRON = replace(OURS, name="nanotron", overlap_gradients=0.0, overlap_gathers=0.0, reduce_each_micro_batch=False)
"""Gradients are exchanged after the last backward; the rest as in a plain network with fused attention."""
PROGRAMS = {
    "megatron-2021": Program(MEGATRON_2021, _megatron, sequence_parallel=False, dtype="float16"),
    "megatron-2021-figure-13": Program(MEGATRON_2021, _figure_13, sequence_parallel=False, dtype="float16"),
    "nanotron-2025": Program(NANOTRON, _nanotron),
}
THIS = Program(None, lambda layouts: layouts.order == 0)
"""Everything but other placements than tensor parallel innermost, which never win here."""


def best_by_family(space: Space, cluster: ClusterSpec, program: Program) -> dict[Family, Best]:
    """The fastest layout that fits, of every family that has one."""
    found = {}
    for family in space.families():
        best: tuple[float, Layouts, Evaluation, int] | None = None
        for chunk in space.chunks(family, Counts()):
            kept = chunk.take(program.allows(chunk)).with_columns(sequence_parallel=program.sequence_parallel)
            if not len(kept):
                continue
            values = evaluate(space.work, cluster, kept, program.rules)
            times = np.where(values.fits, values.step_time, np.inf)
            index = int(np.argmin(times))
            if np.isfinite(times[index]) and (best is None or times[index] < best[0]):
                best = (float(times[index]), kept, values, index)
        if best is not None:
            seconds, layouts, values, index = best
            layout = to_layout(layouts.with_columns(order=np.int64(0)), index, space.work.spec.layers)
            time = {name: float(part[index]) for name, part in values.time.items()}
            found[family] = Best(str(layout.model_copy(update={"stages": None})), seconds, time)
    return found


@dataclass(frozen=True)
class Row:
    """One published best layout beside the planner's."""

    model: str
    devices: int
    theirs: str
    same_program: str
    """The pick with their program."""
    excess: float | None
    """How much slower theirs is predicted than that pick; None: predicted not to fit."""
    rank: int | None
    """Of theirs among the families that fit."""
    why: str
    ours: str
    gain: float | None
    """How much faster the pick with this program is than their layout with theirs, in step time."""
    verdict: str


def row_of(
    raw: dict[str, Any], spec: ModelSpec, cluster: ClusterSpec, sequence: int, batch: int, theirs: Program
) -> Row:
    """Plan one row twice."""
    family = Family(pp=raw["pp"], tp=raw["tp"], dp=raw["dp"])
    answers = []
    for program in (theirs, THIS):
        work = Work(spec=spec, sequence=sequence, global_batch=batch, dtype=program.dtype)  # type: ignore[arg-type]
        answers.append(best_by_family(Space(work, cluster.devices, cluster.devices_per_node), cluster, program))
    with_theirs, with_ours = answers
    ranked = sorted(with_theirs, key=lambda each: with_theirs[each].seconds)
    pick = with_theirs[ranked[0]]
    ours = min(with_ours.values(), key=lambda each: each.seconds)
    published = with_theirs.get(family)
    excess = published.seconds / pick.seconds - 1 if published else None
    return Row(
        model=spec.name,
        devices=raw["devices"],
        theirs=str(family),
        same_program=str(ranked[0]),
        excess=excess,
        rank=ranked.index(family) + 1 if published else None,
        why="same" if ranked[0] == family else _difference(published, pick),
        ours=ours.layout,
        gain=1 - ours.seconds / published.seconds if published else None,
        verdict="same" if ranked[0] == family else "alike" if excess is not None and excess < _SAME else "other",
    )


def _difference(published: Best | None, pick: Best) -> str:
    """Which parts of the step the pick saves and pays, in per cent of theirs."""
    if published is None:
        return "predicted not to fit"
    change = {name: (pick.time[name] - published.time[name]) / published.seconds for name in pick.time}
    saved = sorted((name for name in change if change[name] < -0.003), key=lambda name: change[name])[:2]
    paid = sorted((name for name in change if change[name] > 0.003), key=lambda name: -change[name])[:2]
    words = []
    if saved:
        words.append("saves " + ", ".join(f"{_WORDS.get(name, name)} {-change[name]:.1%}" for name in saved))
    if paid:
        words.append("pays " + ", ".join(f"{_WORDS.get(name, name)} {change[name]:.1%}" for name in paid))
    return "; ".join(words) or "alike in every part"


_WORDS = {"tp": "tensor-parallel exchange", "shard": "gradient exchange", "replicate": "gradient exchange",
          "pp": "transfers", "recompute": "recomputation", "other": "host work"}  # fmt: skip


def rows(group: dict[str, Any], program: Program, only: str | None = None) -> list[Row]:
    """All rows of one group."""
    found = []
    for raw in group["rows"]:
        if only is not None and raw["model"] != only:
            continue
        if "models" in group:
            spec = ModelSpec(name=raw["model"], **group["models"][raw["model"]])
        else:
            spec = preset(raw["model"])
        cluster = load_cluster(f"{raw['devices'] // 8}x8 {group['cluster']}")
        found.append(row_of(raw, spec, cluster, group["sequence"], raw.get("global_batch", 256), program))
    return found


def table(found: list[Row]) -> str:
    """As Markdown."""
    lines = [
        "| model | GPUs | theirs | pick with their program | theirs predicted | the pick, against theirs | "
        "pick with this program | step time |",
        "|---|---:|---|---|---|---|---|---:|",
    ]
    for row in found:
        slower = "does not fit" if row.excess is None else "fastest" if row.excess == 0 else f"{row.excess:.1%} slower"
        place = "" if row.rank is None else f", rank {row.rank}"
        gain = "" if row.gain is None else f"{-row.gain:+.0%}"
        lines.append(
            f"| {row.model} | {row.devices} | {row.theirs} | {row.same_program} | {slower}{place} | {row.why} | "
            f"{row.ours} | {gain} |"
        )
    same, alike = (sum(row.verdict == word for row in found) for word in ("same", "alike"))
    lines.append(f"\nSame family: {same} of {len(found)}; another within {_SAME:.0%}: {alike}.")
    return "\n".join(lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=sorted(PROGRAMS), help="one of the three")
    parser.add_argument("--model", help="one model of it")
    options = parser.parse_args()
    groups = json.loads(FILE.read_text(encoding="utf-8"))
    for name in [options.group] if options.group else list(groups):
        print(
            f"## {name}\n\n{groups[name]['source']}.\n\n{table(rows(groups[name], PROGRAMS[name], options.model))}\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
