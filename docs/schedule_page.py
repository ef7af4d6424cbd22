"""The page on pipeline schedules and its pictures, drawn and counted by the program: `make docs`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from meshwright.job.layout import LOOPED_SCHEDULES, V_SCHEDULES
from meshwright.schedule.draw_svg import draw_svg
from meshwright.schedule.in_flight import in_flight
from meshwright.schedule.orders import SCHEDULES
from meshwright.schedule.simulate import Simulation, simulate
from meshwright.schedule.table import table

ROOT = Path(__file__).parent
PAGE = ROOT / "concepts" / "schedules.md"
RANKS, MICRO_BATCHES, MESSAGE = 4, 8, 0.1


@lru_cache(maxsize=1)
def schedule_pages() -> dict[Path, str]:
    """The page and one picture a schedule."""
    pictures = {ROOT / "pictures" / f"schedule-{name}.svg": picture(name) for name in SCHEDULES}
    return {PAGE: PAGE_TEXT.format(figures=figures(), sections=sections(), bubbles=bubbles()), **pictures}


def stages_a_rank(schedule: str) -> int:
    """As many as the layout has by default."""
    return 2 if schedule in LOOPED_SCHEDULES | V_SCHEDULES else 1


def run(schedule: str, virtual: int, message: float = 0.0) -> Simulation:
    """Every rank's forward, input part and weight part of a micro-batch take 1, its stages' a share of that."""
    part = 1 / virtual
    return simulate(table(schedule, RANKS, virtual, MICRO_BATCHES), part, part, part, message)


def picture(schedule: str) -> str:
    """One schedule without messages."""
    return draw_svg(run(schedule, stages_a_rank(schedule)), unit="forward passes of a rank")


def figures() -> str:
    """One row a schedule."""
    lines = []
    for schedule in SCHEDULES:
        for virtual in (2, 4) if schedule in ("interleaved", "looped-bfs") else (stages_a_rank(schedule),):
            free, sent = run(schedule, virtual), run(schedule, virtual, MESSAGE)
            bubble = free.makespan - free.busy.max()
            counts = [
                " ".join(f"{count / virtual:g}" for count in in_flight(free.table, until).rank)
                for until in ("input", "weight")
            ]
            held = counts[0] if counts[0] == counts[1] else f"{counts[0]}; {counts[1]}"
            lines.append(
                f"| {schedule} | {virtual} | {bubble:.3g} | {bubble / free.makespan:.1%} "
                f"| {sent.makespan - free.makespan:.3g} | {held} |"
            )
    return "\n".join(lines)


def bubbles() -> str:
    """Share of the step lost to the bubble by number of micro-batches, on the rank that works most."""
    counts = (RANKS, 2 * RANKS, 4 * RANKS, 8 * RANKS, 16 * RANKS)
    lines = [
        "| schedule | " + " | ".join(f"m = {count}" for count in counts) + " |",
        "|---|" + "---|" * len(counts),
    ]
    for schedule in SCHEDULES:
        virtual = stages_a_rank(schedule)
        cells = []
        for count in counts:
            if schedule == "dualpipev" and count < 2 * RANKS:
                cells.append("–")
                continue
            simulation = simulate(table(schedule, RANKS, virtual, count), 1, 1, 1)
            cells.append(f"{1 - np.max(simulation.busy) / simulation.makespan:.0%}")
        lines.append(f"| {schedule} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sections() -> str:
    """A picture and a sentence for each schedule."""
    return "\n\n".join(
        f"### {name}\n\n{SENTENCES[name]}\n\n![{name} on {RANKS} ranks](../pictures/schedule-{name}.svg)"
        for name in SCHEDULES
    )


SENTENCES = {
    "gpipe": "All forwards, then all backwards. Every rank holds all micro-batches. Huang et al. 2019.",
    "1f1b": (
        "Rank r runs `pp - 1 - r` forwards ahead, then forward and backward in turn: the same bubble, but at most"
        " `pp - r` micro-batches held. With so few in flight, messages are waited for. Narayanan et al. 2019."
    ),
    "interleaved": (
        "1F1B with several stages a rank: the bubble is divided by their number, more is held, and messages are as many"
        " times more. Narayanan et al. 2021."
    ),
    "looped-bfs": (
        "All micro-batches through the rank's first stage, then through its next: the interleaved bubble, and each"
        " stage's parameters are needed once forward and once backward. Every rank holds everything. Lamy-Poirier 2023."
    ),
    "zero-bubble": (
        "The backward in two parts: gradients of the input, which the rank before waits for, and of the weights, which"
        " nobody waits for and which fill the gaps. Qi et al. 2023 (ZB1P)."
    ),
    "zbv": (
        "Two stages a rank, folded into a V: the last rank has two neighbours in one, and the first stage and the loss"
        " share a rank. If all three parts took equal times, no rank would idle between its first and last action."
        " Qi et al. 2023."
    ),
    "dualpipev": (
        "The same V with forwards and backwards in pairs, meant to run at once. Torch's runtime runs the two after one"
        " another and sends the forward's output after both, which costs it twice zero bubble's bubble. DeepSeek 2024."
    ),
}

PAGE_TEXT = f"""# Pipeline schedules

A schedule says in which order a pipeline rank runs the forwards and backwards of its micro-batches. It does not change
what is computed, only how long ranks wait (the *bubble*) and how many micro-batches' activations they hold. The tables
that are drawn and counted here are the orders that training runs. Written by `make docs`.

Four ranks, eight micro-batches; a rank's forward, input gradients and weight gradients of one micro-batch take 1 each
(24 in all), whatever the number of its stages:

| schedule | stages a rank | bubble | of the step | with messages of {MESSAGE} | held on ranks 0 to 3 |
|---|---|---|---|---|---|
{{figures}}

*Held* is in activations of one micro-batch in the whole rank. Two rows of figures, where backward is in two parts:
until the input part; until the weight part. What a program holds lies between: the input part frees what the
weight gradients do not need. Stages that recompute themselves run both parts at once; the first figures hold.

In closed form, with F, I, W the seconds of one *stage* and v stages a rank (`meshwright.schedule.bubble`,
`in_flight_closed`) and rounds of pp micro-batches:

| schedule | bubble | held on rank r (stages x micro-batches, at most all) |
|---|---|---|
| gpipe, looped-bfs | (pp−1)(F+I+W) | all: v m |
| 1f1b | (pp−1)(F+I+W) | pp − r |
| interleaved | (pp−1)(F+I+W) | (v−1) pp + 2(pp−1−r) + 1 |
| zero-bubble | (pp−1) max(F+I−W, F, I) | (v−1) pp + pp − r; v pp |
| zbv | (pp−1) I if the parts are about equal | 2 pp |
| dualpipev | (pp−1)(2F + I − W) | 2 pp + 1 |

More micro-batches make every bubble smaller; share of the step, by micro-batches m on four ranks:

{{bubbles}}

## Which to take

- Enough micro-batches (eight a rank and more): `1f1b`. It holds least and sends least.
- Few micro-batches, memory to spare: `interleaved`, or `looped-bfs` with `zero=2` or `3`.
- Few micro-batches, stages of equal times, no full recomputation: `zero-bubble` or `zbv`.

A number of micro-batches that a schedule cannot run is refused by name, with the nearest that it can.

## One by one

Numbers are micro-batches; hatched bars are the rank's second stage.

{{sections}}

## Your own times

    from meshwright.schedule.draw_text import draw_text
    from meshwright.schedule.simulate import simulate
    from meshwright.schedule.table import table

    # Seconds per stage of forward, input part and weight part, and of a message over each boundary.
    run = simulate(table("1f1b", 4, 1, 8), [0.011, 0.010, 0.010, 0.014], 0.012, 0.009, transfer=0.002)
    print(draw_text(run), run.bubble, run.exposed)

`sends="in-turn"` lets a rank's messages wait for each other, `"blocking"` stops its computation while it sends.
"""
