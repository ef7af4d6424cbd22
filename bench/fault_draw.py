"""Which faults the campaign injects: every kind and every layout in turn, the rest of the address drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.job.fault_section import KINDS, SAVE_PHASES, STEP_PHASES, Fault, parse_fault
from meshwright.job.layout_text import parse_layout

STEPS, EVERY = 24, 2
"""Of every run: optimizer steps, and steps between checkpoints."""
WINDOW, FIRST = 5, 4
"""One run meets up to four faults, each in a window of so many steps; the first begins where there is a checkpoint
to go back to, and one before it."""
TOGETHER = (STEPS - FIRST) // WINDOW

LAYOUTS = (
    "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "tp=2", "pp=2",
    "dp=3 zero=1", "dp=3 zero=3", "dp=4", "dp=4 zero=2", "dp=4 shard=2 zero=3",
    "dp=2 tp=2 zero=1", "dp=2 pp=2 zero=1", "tp=2 pp=2", "pp=4",
)  # fmt: skip
"""2 to 4 ranks: replicated, ZeRO 1 to 3, tensor parallel, pipeline, and their products."""

REPLICATED = ("dp=2", "dp=4", "dp=4 shard=2 zero=3")
"""Layouts in which every master value stands on two ranks or more: only there a flipped bit can be seen."""

SHORT = 0.6
"""Seconds of what does not last: less than any bound, so that nothing may come of it."""
LIMITS = ("stopped_after=3.0", "hang_after=10.0", "setup_after=30.0", "collective_after=90.0", "handover=5.0")
"""``[recovery]`` of every run: above what a busy machine makes of a step, and no longer."""


@dataclass(frozen=True)
class Sort:
    """One sort of fault of the campaign: its text without the address, and what must become of it."""

    text: str
    outcome: str
    """``undisturbed``: the run goes on as if nothing had been; ``recovers``: it goes on by itself, from a good state,
    and a rank is to blame; ``stops``: it ends by an agreed decision, with a good state; ``lost``: it ends, and no rank
    is to blame; ``either``: all of that is right."""
    weight: int = 1
    then_kill: bool = False
    """Silent, and met only by who comes back to it: a kill follows."""

    @property
    def kind(self) -> str:
        """The kind of fault."""
        return self.text.split()[0]


SORTS = (
    Sort("kill", "recovers", 4),
    Sort("raise", "recovers", 2),
    Sort("exit code=3", "recovers", 2),
    Sort("stop", "recovers", 2),
    Sort("hang", "recovers"),
    Sort("hung-write", "recovers"),
    Sort("kill-store", "recovers"),
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
    Sort("flip-bit bit=62", "recovers", 2),
    Sort("kill-launcher", "lost"),
    Sort("link-down", "either"),
)


@dataclass(frozen=True)
class Entry:
    """One fault of the campaign."""

    number: int
    sort: Sort
    faults: tuple[Fault, ...]
    """The first is the one that counts; a second is the kill that brings a silent one to light."""

    @property
    def fault(self) -> Fault:
        """The one that counts."""
        return self.faults[0]

    @property
    def outcome(self) -> str:
        """What must become of it: as its sort says, but an exception in a write fails the save, on all ranks alike."""
        return "stops" if self.sort.kind == "raise" and self.fault.phase in SAVE_PHASES[:3] else self.sort.outcome

    @property
    def blamed(self) -> int | None:
        """The rank that must be named; None where none is to blame."""
        if self.sort.kind == "kill-store":
            return 0  # it holds the store
        if self.outcome not in ("recovers", "stops") or self.sort.kind == "nan":
            return None
        return self.faults[-1].rank


@dataclass(frozen=True)
class Group:
    """One run, and the faults it meets one after the other."""

    number: int
    layout: str
    entries: tuple[Entry, ...]
    settings: tuple[str, ...]
    resume_layout: str
    """Under which it goes on where it ended and is resumed by command."""

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Of all entries, in order."""
        return tuple(fault for entry in self.entries for fault in entry.faults)


def draw(
    faults: int, seed: int, layouts: Sequence[str] = LAYOUTS, sorts: Sequence[Sort] = SORTS, together: int = TOGETHER
) -> list[Group]:
    """So many faults in runs of up to ``together``, always the same for a seed: all layouts and all sorts come equally
    often, by weight. A third of the runs meet a single fault and go on under another layout.
    """
    chance = random.Random(seed)
    weighted = [sort for sort in sorts for _ in range(sort.weight)]
    order: list[Sort] = []
    layout_order: list[str] = []
    groups: list[Group] = []
    number = 0
    while number < faults:
        layout_order = layout_order or chance.sample(list(layouts), len(layouts))
        alone = chance.random() < 1 / 3
        count = 1 if alone else min(together, faults - number)
        entries = []
        for place in range(count):
            order = order or chance.sample(weighted, len(weighted))
            entries.append(_entry(number, layout_order[0], order.pop(), place, chance))
            number += 1
        groups.append(_group(len(groups), layout_order.pop(0), entries, layouts, alone, chance))
    return groups


def _entry(number: int, layout: str, sort: Sort, place: int, chance: random.Random) -> Entry:
    ranks = parse_layout(layout).ranks
    if sort.kind == "flip-bit" and layout not in REPLICATED:
        sort = next(one for one in SORTS if one.kind == "kill")
    rank, kind = chance.randrange(ranks), KINDS[sort.kind]
    phases = [phase for phase in kind.phases if phase != "commit" or rank == 0]
    if sort.text == "hang":
        phases = [phase for phase in phases if phase in STEP_PHASES]  # in a save, hung-write is the same
    # As often in a save as in a step, where both can be.
    both = [[phase for phase in phases if phase in part] for part in (STEP_PHASES, SAVE_PHASES)]
    phase = chance.choice(chance.choice([part for part in both if part]))
    if sort.then_kill or sort.kind == "flip-bit":
        phase = kind.phase
    begin = FIRST + place * WINDOW
    choices = [step for step in range(begin, begin + WINDOW - 1) if phase not in SAVE_PHASES or step % EVERY == 0]
    step = chance.choice(choices)
    name, _, rest = sort.text.partition(" ")
    faults = [parse_fault(f"{name} rank={rank} step={step} phase={phase} {rest}")]
    if sort.then_kill:
        faults.append(parse_fault(f"kill rank={chance.randrange(ranks)} step={step + 1} phase=forward"))
    return Entry(number, sort, tuple(faults))


def _group(
    number: int, layout: str, entries: Sequence[Entry], layouts: Sequence[str], alone: bool, chance: random.Random
) -> Group:
    ranks = parse_layout(layout).ranks
    settings = [f"recovery.{limit}" for limit in LIMITS]
    if any(entry.sort.then_kill for entry in entries) or chance.random() < 0.5:
        settings.append("recovery.memory=false")  # what is damaged on disk is met only by who reads it
    if any(entry.sort.kind == "flip-bit" for entry in entries):
        settings.append("recovery.digest_every=1")
    others = [one for one in layouts if one != layout and parse_layout(one).ranks <= ranks]
    if alone:
        settings.append("recovery.replacements=0")
    return Group(number, layout, tuple(entries), tuple(settings), chance.choice(others) if alone and others else layout)
