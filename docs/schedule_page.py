"""The page on pipeline schedules and its pictures, drawn and counted by the program: `make docs`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from meshwright.job.layout import DELAYED_SCHEDULES, LOOPED_SCHEDULES, V_SCHEDULES
from meshwright.schedule.draw_svg import draw_svg
from meshwright.schedule.in_flight import in_flight
from meshwright.schedule.orders import SCHEDULES
from meshwright.schedule.simulate import Simulation, simulate
from meshwright.schedule.table import table

ROOT = Path(__file__).parent
PAGE = ROOT / "concepts" / "schedules.md"
RANKS, MICRO_BATCHES, MESSAGE = 4, 8, 0.1
STEPS = 8
"""Where steps overlap: so many and twice as many are simulated, to see what one between others takes."""


@lru_cache(maxsize=1)
def schedule_pages() -> dict[Path, str]:
    """The page and one picture a schedule."""
    pictures = {ROOT / "pictures" / f"schedule-{name}.svg": picture(name) for name in SCHEDULES}
    return {PAGE: PAGE_TEXT.format(figures=figures(), sections=sections(), bubbles=bubbles()), **pictures}


def stages_a_rank(schedule: str) -> int:
    """As many as the layout has by default."""
    return 2 if schedule in LOOPED_SCHEDULES | V_SCHEDULES else 1


def run(
    schedule: str, virtual: int, message: float = 0.0, micro_batches: int = MICRO_BATCHES, steps: int = 1
) -> Simulation:
    """Every rank's forward, input part and weight part of a micro-batch take 1, its stages' a share of that."""
    part = 1 / virtual
    return simulate(table(schedule, RANKS, virtual, micro_batches, steps), part, part, part, message)


def seconds(schedule: str, virtual: int, message: float = 0.0, micro_batches: int = MICRO_BATCHES) -> float:
    """Of a step; where steps overlap, of one between others."""
    if schedule not in DELAYED_SCHEDULES:
        return run(schedule, virtual, message, micro_batches).makespan
    fewer, more = (run(schedule, virtual, message, micro_batches, steps).makespan for steps in (STEPS, 2 * STEPS))
    return (more - fewer) / STEPS


def picture(schedule: str) -> str:
    """One schedule without messages."""
    if schedule in DELAYED_SCHEDULES:
        title = f"{schedule}: {RANKS} ranks, 3 steps of {RANKS} micro-batches, numbered through"
        return draw_svg(run(schedule, 1, 0.0, RANKS, 3), title, unit="forward passes of a rank")
    return draw_svg(run(schedule, stages_a_rank(schedule)), unit="forward passes of a rank")


def figures() -> str:
    """One row a schedule."""
    lines = []
    for schedule in SCHEDULES:
        for virtual in (2, 4) if schedule in ("interleaved", "looped-bfs") else (stages_a_rank(schedule),):
            free, whole = run(schedule, virtual), seconds(schedule, virtual)
            bubble = whole - free.busy.max()
            counts = [
                " ".join(f"{count / virtual:g}" for count in in_flight(free.table, until).rank)
                for until in ("input", "weight")
            ]
            held = counts[0] if counts[0] == counts[1] else f"{counts[0]}; {counts[1]}"
            lines.append(
                f"| {schedule} | {virtual} | {bubble:.3g} | {bubble / whole:.1%} "
                f"| {seconds(schedule, virtual, MESSAGE) - whole:.3g} | {held} |"
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
            busy = float(np.max(run(schedule, virtual, micro_batches=count).busy))
            cells.append(f"{1 - busy / seconds(schedule, virtual, micro_batches=count):.0%}")
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
    "2bw": (
        "1F1B that does not stop between steps: while one drains the next has begun, so only the first step of a run"
        " and those behind a validation or checkpoint wait. The price is another recursion and two versions of"
        " parameters and gradients: see below. Narayanan et al. 2021 (PipeDream-2BW, arXiv:2006.09503)."
    ),
}

PAGE_TEXT = f"""# Pipeline schedules

A schedule says in which order a pipeline rank runs the forwards and backwards of its micro-batches. None but `2bw`
changes what is computed, only how long ranks wait (the *bubble*) and how many micro-batches' activations they hold. The
tables that are drawn and counted here are the orders that training runs. Written by `make docs`.

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
| 2bw | 0, of a step between others | pp − r |

More micro-batches make every bubble smaller; share of the step, by micro-batches m on four ranks:

{{bubbles}}

## Which to take

- Enough micro-batches (eight a rank and more): `1f1b`. It holds least and sends least.
- Few micro-batches, memory to spare: `interleaved`, or `looped-bfs` with `zero=2` or `3`.
- Few micro-batches, stages of equal times, no full recomputation: `zero-bubble` or `zbv`.
- `2bw` where a gradient may be one update late, and parameters and gradients fit twice. `meshwright plan --delayed`
  tries it beside the others.

A number of micro-batches that a schedule cannot run is refused by name, with the nearest that it can.

## One by one

Numbers are micro-batches; hatched bars are the rank's second stage.

{{sections}}

## Steps that overlap: 2bw

Every schedule but this one ends with the step: the pipeline drains, gradients are summed, parameters change, and it
fills again. `2bw` (double-buffered weights) does not drain. The forwards of step t+1 begin while the backwards of
step t run, before its update is there, so each gradient is taken at the parameters of one update before:

    W_(t+1) = W_t - update(gradient of step t at W_(t-1)),    W_(-1) = W_0

for every rank and micro-batch alike: the delay is one, whatever the depth. Each micro-batch's forward and backward use
the same parameters. A rank has two steps in flight at most, so it keeps two *versions* of its parameters and of its
gradient buffers, and one set of optimizer moments; this takes at least `pp` micro-batches a step. 16-bit types keep the
masters of both versions too. `meshwright plan JOB --cluster CLUSTER --explain` says the bytes.

- **Clipping and the norm.** A rank says its squares when its gradients of step t are complete, and computes on; when
  all its forwards of step t+1 have run it hears the sum, clips by it and updates. No rank stops for it. With
  `train.deterministic = true` the norm takes a second round, in which all ranks wait once a step.
- **Learning rate, moments, bias correction** count updates, as ever: step t's update uses the rate of step t.
- **Validation, checkpoints and the end of the run** drain the pipeline. They change no bit of what follows, wherever
  they lie: the first step behind them uses the parameters that it would have used. Validation uses the newest ones.
- **Checkpoints** hold both versions, and a resumed run is bit-equal to one that nobody stopped. An export, and a run
  under another schedule, take the newest. A run that goes on from another schedule's checkpoint begins as the first
  step does: with both versions alike.
- **A step that is not finite** is known one step later: with `nonfinite = "stop"` the step behind it is thrown away,
  with `"skip"` the parameters stay what they were for one update.
- **In `metrics.jsonl`** a step is recorded when it ends, which is while the next one runs.

It goes with `dp`, `tp`, `zero = 0` and `1`, and every recomputation. Refused by name: `zero = 2` and `3`, tied
embeddings, float16, `train.compile`, `batch.split`, other synchronisation than all-reduce without compression,
`recovery.outlier`, `memory_every` and `digest_every`, injected faults, and `checkpoint.interval`. Replicas hand nothing
over when a rank fails: the run goes on from the last checkpoint. `meshwright check` holds it against the same recursion
on one device:

    meshwright check examples/quickstart.toml --layout "pp=2 schedule=2bw" --dtype float64

What it changes in training is the delay: with a large learning rate a gradient that is one update late can diverge
where the plain one does not (for a quadratic, the rate must stay below half of the plain limit: η λ < 1 instead of 2).

## Your own times

    from meshwright.schedule.draw_text import draw_text
    from meshwright.schedule.simulate import simulate
    from meshwright.schedule.table import table

    # Seconds per stage of forward, input part and weight part, and of a message over each boundary.
    run = simulate(table("1f1b", 4, 1, 8), [0.011, 0.010, 0.010, 0.014], 0.012, 0.009, transfer=0.002)
    print(draw_text(run), run.bubble, run.exposed)

`sends="in-turn"` lets a rank's messages wait for each other, `"blocking"` stops its computation while it sends.
"""
