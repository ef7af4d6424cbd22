"""What the report's pictures are drawn with: escaped SVG elements, scales with round ticks, units, colours.

Ink (text, axes, grids) takes its colour from the page, light or dark; data takes Okabe and Ito's colours, which
all common colour blindnesses tell apart. Every mark carries its number in ``data-value`` and says it when pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

BLACK, ORANGE, SKY, GREEN = "#6b6b6b", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, LIGHT = "#999999", "#bdbdbd"
WIDTH = 900
"""Pixels of every picture; the page scales it."""


class Picture:
    """One SVG picture under construction."""

    def __init__(self, name: str, height: float, title: str, description: str) -> None:
        self.name, self._height = name, height
        self._parts = [
            f'<title id="{name}-title">{escape(title)}</title>',
            f'<desc id="{name}-description">{escape(description)}</desc>',
        ]

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, tip: str = "", value: float | None = None
    ) -> None:
        """A filled rectangle; ``tip`` is shown when pointed at, ``value`` is the number it stands for."""
        box = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.0):.2f}" height="{height:.2f}"'
        self._mark("rect", f'{box} fill="{fill}"', tip, value)

    def circle(
        self, x: float, y: float, radius: float, look: str, tip: str = "", value: Sequence[float] | float | None = None
    ) -> None:
        """A dot; ``look`` is a class of the page."""
        self._mark("circle", f'cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}" class="{look}"', tip, value)

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str, tip: str = "") -> None:
        """A straight line."""
        self._mark("line", f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" class="{look}"', tip, None)

    def curve(self, points: Iterable[tuple[float, float]], look: str) -> None:
        """A line through points."""
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="{look}"/>')

    def text(self, x: float, y: float, words: str, look: str = "") -> None:
        """Words; ``look``: ``end``, ``middle``, ``small``, ``strong``, several parted by spaces."""
        style = f' class="{look}"' if look else ""
        self._parts.append(f'<text x="{x:.2f}" y="{y:.2f}"{style}>{escape(words)}</text>')

    def upright(self, x: float, y: float, words: str) -> None:
        """Words read from bottom to top, centred at the point: what a vertical axis shows."""
        place = f'transform="translate({x:.2f} {y:.2f}) rotate(-90)"'
        self._parts.append(f'<text {place} class="middle">{escape(words)}</text>')

    def _mark(self, element: str, attributes: str, tip: str, value: Sequence[float] | float | None) -> None:
        if value is not None:
            numbers = [value] if isinstance(value, (int, float)) else value
            attributes += f' data-value="{" ".join(repr(number) for number in numbers)}"'
        inside = f"><title>{escape(tip)}</title></{element}>" if tip else "/>"
        self._parts.append(f"<{element} {attributes}{inside}")

    def __str__(self) -> str:
        head = (
            f'<svg viewBox="0 0 {WIDTH} {self._height:g}" width="{WIDTH}" height="{self._height:g}" role="img" '
            f'aria-labelledby="{self.name}-title" aria-describedby="{self.name}-description">'
        )
        return "\n".join([head, *self._parts, "</svg>"])


@dataclass(frozen=True)
class Scale:
    """From values to pixels, linear or logarithmic."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Where a value is drawn."""
        if self.logarithmic:
            share = math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)
        else:
            share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, most: int = 8) -> list[float]:
        """Round values inside the scale."""
        if not self.logarithmic:
            return _linear(self.low, self.high, most)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = [step * 10.0**power for power in powers for step in steps]
            inside = [value for value in found if self.low <= value * (1 + 1e-9) and value <= self.high * (1 + 1e-9)]
            if len(inside) <= most:
                break
        return inside if len(inside) > 2 else _linear(self.low, self.high, most)


def _linear(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True)
class Unit:
    """What an axis counts in."""

    size: float
    name: str

    def show(self, value: float) -> str:
        """A tick's text, without the unit's name."""
        return f"{value / self.size:.6g}"


def byte_unit(largest: float) -> Unit:
    """The decimal unit that fits: MB is 10^6 bytes."""
    return _fitting(largest, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")))


def second_unit(largest: float) -> Unit:
    """The part of a second that fits."""
    return _fitting(largest, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))


def _fitting(largest: float, units: tuple[tuple[float, str], ...]) -> Unit:
    return next((Unit(*unit) for unit in units if largest >= unit[0]), Unit(*units[-1]))


def show_bytes(value: float) -> str:
    """As a person reads it: 82.2 GB."""
    unit = byte_unit(abs(value))
    return f"{value / unit.size:.4g} {unit.name}"


def show_seconds(value: float) -> str:
    """As a person reads it: 30.8 s, 1.94 ms."""
    unit = second_unit(abs(value))
    return f"{value / unit.size:.4g} {unit.name}"


def show_ranks(ranks: Sequence[int], most: int = 60) -> str:
    """``rank 3``, ``ranks 0-3, 8-11``; what is longer than ``most`` letters is counted: ``48 ranks from 0``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    whole = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
    return whole if len(whole) <= most else f"{len(ranks)} ranks from {min(ranks)}"


def draw_legend(picture: Picture, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
    """Names beside colours, in as many lines as they take."""
    left, top = x, y
    for name, colour in entries:
        long = 30 + 7.4 * len(name)
        if left + long > WIDTH and left > x:
            left, top = x, top + 20
        picture.rect(left, top - 10, 14, 12, colour)
        picture.text(left + 20, top, name)
        left += long


def legend_lines(entries: Sequence[tuple[str, str]], x: float) -> int:
    """How many lines ``draw_legend`` will take."""
    left, lines = x, 1
    for name, _ in entries:
        long = 30 + 7.4 * len(name)
        if left + long > WIDTH and left > x:
            left, lines = x, lines + 1
        left += long
    return lines


def draw_x_axis(picture: Picture, scale: Scale, top: float, bottom: float, unit: Unit, words: str) -> None:
    """A horizontal axis under the picture with grid lines up to ``top``."""
    for tick in scale_ticks(scale, unit):
        x = scale(tick)
        picture.line(x, top, x, bottom, "grid")
        picture.text(x, bottom + 15, unit.show(tick), "middle")
    picture.line(scale.begin, bottom, scale.end, bottom, "axis")
    name = f" ({unit.name})" if unit.name else ""
    picture.text((scale.begin + scale.end) / 2, bottom + 33, f"{words}{name}", "middle")


def draw_y_axis(picture: Picture, scale: Scale, left: float, right: float, unit: Unit, words: str) -> None:
    """A vertical axis at ``left`` with grid lines up to ``right``."""
    for tick in scale_ticks(scale, unit, 6):
        y = scale(tick)
        picture.line(left, y, right, y, "grid")
        picture.text(left - 7, y + 4, unit.show(tick), "end")
    picture.line(left, scale.begin, left, scale.end, "axis")
    name = f" ({unit.name})" if unit.name else ""
    picture.upright(14, (scale.begin + scale.end) / 2, f"{words}{name}")


def scale_ticks(scale: Scale, unit: Unit, most: int = 8) -> list[float]:
    """Ticks that are round in the axis's unit."""
    in_unit = Scale(scale.low / unit.size, scale.high / unit.size, scale.begin, scale.end, scale.logarithmic)
    return [tick * unit.size for tick in in_unit.ticks(most)]
