"""A run over its steps and over its hours: loss, speed, attempts, checkpoints, stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.observe.report_svg import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILION,
    WIDTH,
    Picture,
    Scale,
    Unit,
    draw_legend,
    draw_x_axis,
    draw_y_axis,
    show_seconds,
)

_LEFT, _TOP, _HEIGHT, _RIGHT = 80, 20, 240, WIDTH - 30
_COUNT = Unit(1.0, "")
EVENT_COLOURS = {
    "started": GREEN, "resumed": GREEN, "saved": BLUE, "skipped": ORANGE, "not-finite": VERMILION, "stopped": VERMILION,
    "done": PURPLE,
}  # fmt: skip

Series = Sequence[tuple[int, float]]
"""Values by step."""


def loss_picture(training: Series, validation: Series, floor: float | None) -> str:
    """Loss in nats per token; ``floor`` is the unigram entropy of the validation tokens."""
    values = [value for _, value in (*training, *validation)] + ([floor] if floor else [])
    last = f"last training loss {training[-1][1]:.4g}" if training else ""
    told = ", ".join(part for part in (last, f"last validation {validation[-1][1]:.4g}" if validation else "") if part)
    picture = Picture("loss", _TOP + _HEIGHT + 76, "Loss over the steps", told)
    steps, scale = _frame(picture, [step for step, _ in (*training, *validation)], values, "loss (nats per token)")
    if floor:
        tip = f"unigram entropy of the validation tokens: {floor:.4g} nats"
        picture.line(_LEFT, scale(floor), _RIGHT, scale(floor), "limit", tip)
    _line(picture, training, steps, scale, "curve", "training loss")
    for step, value in validation:
        picture.circle(
            steps(step), scale(value), 5, "validation", f"validation loss at step {step}: {value:.5g}", value
        )
    entries = [("training loss", BLUE), ("validation loss", ORANGE)] + (
        [("unigram entropy of validation", VERMILION)] if floor else []
    )
    draw_legend(picture, _LEFT, _TOP + _HEIGHT + 60, entries)
    return str(picture)


def rate_picture(rates: Series, recorded: Sequence[int]) -> str:
    """Valid tokens a second over the steps; ``recorded`` steps ran slower because the ledger was taken."""
    middle = sorted(value for _, value in rates)[len(rates) // 2]
    picture = Picture("rate", _TOP + _HEIGHT + 46, "Tokens a second over the steps", f"median {middle:,.0f} tokens/s")
    values = [value for _, value in rates] + [0.0]
    steps, scale = _frame(picture, [step for step, _ in rates], values, "valid tokens a second")
    for step in recorded:
        picture.line(steps(step), _TOP, steps(step), _TOP + _HEIGHT, "note", f"step {step} was recorded for the ledger")
    _line(picture, rates, steps, scale, "curve", "tokens/s")
    return str(picture)


def _frame(picture: Picture, steps: Sequence[int], values: Sequence[float], words: str) -> tuple[Scale, Scale]:
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    scale = Scale(max(0.0, low - margin) if low >= 0 else low - margin, high + margin, _TOP + _HEIGHT, _TOP)
    first, last = min(steps), max(steps)
    across = Scale(first - (last == first), last + (last == first), _LEFT, _RIGHT)
    draw_x_axis(picture, across, _TOP, _TOP + _HEIGHT, _COUNT, "step")
    draw_y_axis(picture, scale, _LEFT, _RIGHT, _COUNT, words)
    return across, scale


def _line(picture: Picture, series: Series, steps: Scale, scale: Scale, look: str, words: str) -> None:
    picture.curve([(steps(step), scale(value)) for step, value in series], look)
    for step, value in series:
        picture.circle(steps(step), scale(value), 2, "dot", f"{words} at step {step}: {value:.6g}", value)


@dataclass(frozen=True)
class Attempt:
    """One stretch of a run, from a start or a resume to the last thing recorded of it."""

    begin: float
    """Seconds since the run's first event."""
    end: float
    outcome: str


@dataclass(frozen=True)
class Happened:
    """One event."""

    seconds: float
    """Since the run's first event."""
    event: str
    step: int


def events_picture(attempts: Sequence[Attempt], events: Sequence[Happened]) -> str:
    """When the run ran, and what happened on the way."""
    end = max([attempt.end for attempt in attempts] + [event.seconds for event in events]) or 1.0
    unit = Unit(3600.0, "hours") if end > 3 * 3600 else Unit(60.0, "minutes") if end > 180 else Unit(1.0, "s")
    told = f"{len(attempts)} attempt{'s' * (len(attempts) != 1)} in {show_seconds(end)}"
    bottom = _TOP + 26.0 * len(attempts) + 6
    picture = Picture("events", bottom + 70, "The run in time", told)
    scale = Scale(0.0, end, _LEFT, _RIGHT)
    draw_x_axis(picture, scale, _TOP - 6, bottom, unit, "time since the first start")
    for index, attempt in enumerate(attempts):
        y = _TOP + 26.0 * index
        tip = f"attempt {index + 1}: {show_seconds(attempt.end - attempt.begin)}, {attempt.outcome}"
        picture.text(_LEFT - 8, y + 14, f"attempt {index + 1}", "end")
        width = max(1.0, scale(attempt.end) - scale(attempt.begin))
        picture.rect(scale(attempt.begin), y, width, 20, "#a9cfe8", tip, attempt.end - attempt.begin)
    for event in events:
        row = max((index for index, one in enumerate(attempts) if one.begin <= event.seconds), default=0)
        y, x = _TOP + 26.0 * row, scale(event.seconds)
        colour = EVENT_COLOURS.get(event.event, ORANGE)
        tip = f"{event.event} at step {event.step}, {show_seconds(event.seconds)}"
        picture.rect(x - 1.5, y - 2, 3, 24, colour, tip, event.seconds)
    names = list(dict.fromkeys(event.event for event in events))
    draw_legend(picture, _LEFT, bottom + 56, [(name, EVENT_COLOURS.get(name, ORANGE)) for name in names])
    return str(picture)
