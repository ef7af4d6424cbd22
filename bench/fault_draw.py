"""Which faults the campaign injects: every kind and every layout in turn, the rest of the address drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.job.fault_section import KINDS, SAVE_PHASES, STEP_PHASES, Fault, parse_fault
from meshwright.job.layout_text import parse_layout

STEPS, EVERY = 12, 2
"""Of every run: optimizer steps, and steps between checkpoints."""

LAYOUTS = (
    "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "tp=2", "pp=2",
    "dp=3 zero=1", "dp=3 zero=3", "dp=4", "dp=4 zero=2", "dp=4 shard=2 zero=3",
    "dp=2 tp=2 zero=1", "dp=2 pp=2 zero=1", "tp=2 pp=2", "pp=4",
)  # fmt: skip
"""2 to 4 ranks: replicated, ZeRO 1 to 3, tensor parallel, pipeline, and their products."""

SHORT = 0.6
"""Seconds of what does not last: less than any bound, so that nothing may come of it."""


@dataclass(frozen=True)
class Sort:
    """One sort of fault of the campaign: its text without the address, and what must become of it."""

    text: str
    outcome: str
    """``undisturbed``: the run goes on as if nothing had been; ``recovers``: it ends or restarts, and the cause is a
    rank; ``lost``: the same, but no rank is to blame; ``either``: both are right; ``stops``: by an agreed decision."""
    weight: int = 1
    then_kill: bool = False
    """Silent, and met only by who resumes: a kill follows."""


SORTS = (
    Sort("kill", "recovers", 4),
    Sort("raise", "recovers", 2),
    Sort("exit code=3", "recovers"),
    Sort(f"stop seconds={SHORT}", "undisturbed"),
    Sort(f"hang seconds={SHORT}", "undisturbed"),
    Sort("slow seconds=0.1 steps=2", "undisturbed"),
    Sort(f"hung-write seconds={SHORT}", "undisturbed"),
    Sort("nan", "stops"),
    Sort("disk-full", "stops"),
    Sort("io-error", "stops"),
    Sort("flip-byte", "recovers", then_kill=True),
    Sort("truncate", "recovers", then_kill=True),
    Sort("remove", "recovers", then_kill=True),
    Sort("kill-launcher", "lost"),
    Sort("kill-store", "lost"),
    Sort("link-down", "either"),
)


@dataclass(frozen=True)
class Entry:
    """One run of the campaign."""

    number: int
    layout: str
    sort: Sort
    faults: tuple[Fault, ...]
    """The first is the one that counts; a second is the kill that brings a silent one to light."""
    resume_layout: str
    """Under which it goes on where it has to be resumed by command."""

    @property
    def fault(self) -> Fault:
        """The one that counts."""
        return self.faults[0]

    @property
    def blamed(self) -> int | None:
        """The rank that must be named; None where none is to blame."""
        if self.sort.outcome not in ("recovers", "stops") or self.sort.text == "nan":
            return None
        return self.faults[-1].rank


def draw(runs: int, seed: int, layouts: Sequence[str] = LAYOUTS, sorts: Sequence[Sort] = SORTS) -> list[Entry]:
    """``runs`` entries, always the same for a seed: all layouts and all sorts come equally often, by weight."""
    chance = random.Random(seed)
    weighted = [sort for sort in sorts for _ in range(sort.weight)]
    entries = []
    for number in range(runs):
        if number % len(layouts) == 0:
            layout_order = chance.sample(list(layouts), len(layouts))
        if number % len(weighted) == 0:
            sort_order = chance.sample(weighted, len(weighted))
        layout, sort = layout_order[number % len(layouts)], sort_order[number % len(weighted)]
        entries.append(_entry(number, layout, sort, layouts, chance))
    return entries


def _entry(number: int, layout: str, sort: Sort, layouts: Sequence[str], chance: random.Random) -> Entry:
    ranks = parse_layout(layout).ranks
    rank, kind = chance.randrange(ranks), KINDS[sort.text.split()[0]]
    phases = [phase for phase in kind.phases if phase != "commit" or rank == 0]
    # As often in a save as in a step, where both can be.
    both = [[phase for phase in phases if phase in part] for part in (STEP_PHASES, SAVE_PHASES)]
    phase = kind.phase if sort.then_kill else chance.choice(chance.choice([part for part in both if part]))
    # Not before there is a checkpoint to go back to (two, where the last is damaged), nor at the very end.
    first = 2 * EVERY if sort.then_kill or phase in SAVE_PHASES else EVERY + 1
    choices = [step for step in range(first, STEPS) if phase not in SAVE_PHASES or step % EVERY == 0]
    step = chance.choice(choices)
    name, _, rest = sort.text.partition(" ")
    faults = [parse_fault(f"{name} rank={rank} step={step} phase={phase} {rest}")]
    if sort.then_kill:
        faults.append(parse_fault(f"kill rank={chance.randrange(ranks)} step={step + 1} phase=forward"))
    smaller = [one for one in layouts if one != layout and parse_layout(one).ranks <= ranks]
    other = chance.choice(smaller) if smaller and chance.random() < 0.25 else layout
    return Entry(number, layout, sort, tuple(faults), other)
