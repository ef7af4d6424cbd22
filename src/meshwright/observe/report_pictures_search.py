"""The search as a scatter: what each layout takes in time and memory, which fit, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.observe.report_svg import (
    WIDTH,
    Picture,
    Scale,
    byte_unit,
    draw_x_axis,
    draw_y_axis,
    second_unit,
    show_bytes,
    show_seconds,
)

_LEFT, _TOP, _HEIGHT = 80, 30, 420


@dataclass(frozen=True)
class Point:
    """One layout of the search."""

    seconds: float
    memory: float
    """Bytes of its fullest rank."""
    name: str
    """The layout, or its family."""


def search_picture(
    points: Sequence[tuple[Point, bool]], front: Sequence[Point], best: Sequence[Point], capacity: float | None,
    reasons: Mapping[str, str],
) -> str:  # fmt: skip
    """Time against memory, both logarithmic.

    Args:
        points: a sample of all layouts, and whether each fits.
        front: no layout beats these in both.
        best: the fastest, in order.
        capacity: bytes of a device.
        reasons: why a family's layouts are not the answer.
    """
    everything = [point for point, _ in points] + list(front) + list(best)
    memory = _scale([point.memory for point in everything] + ([capacity] if capacity else []), _LEFT, WIDTH - 30)
    time = _scale([point.seconds for point in everything], _TOP + _HEIGHT, _TOP)
    fitting = sum(fits for _, fits in points)
    told = f"{len(points)} layouts sampled, {fitting} fit"
    if best:
        told += f"; the fastest that fits takes {show_seconds(best[0].seconds)} and {show_bytes(best[0].memory)}"
    picture = Picture("search", _TOP + _HEIGHT + 84, "The search: step time against memory of the fullest rank", told)
    middle = byte_unit((memory.low * memory.high) ** 0.5)
    draw_x_axis(picture, memory, _TOP, _TOP + _HEIGHT, middle, "memory of the fullest rank")
    draw_y_axis(picture, time, _LEFT, WIDTH - 30, second_unit((time.low * time.high) ** 0.5), "step time")
    for point, fits in sorted(points, key=lambda item: item[1]):
        figures = f"{point.name}: {show_seconds(point.seconds)} a step, {show_bytes(point.memory)}"
        why = "" if fits else f"; does not fit. {_reason(point, capacity, reasons)}"
        look = "fits" if fits else "unfit"
        picture.circle(memory(point.memory), time(point.seconds), 3, look, figures + why, (point.memory, point.seconds))
    if capacity:
        picture.line(memory(capacity), _TOP - 6, memory(capacity), _TOP + _HEIGHT, "limit")
        picture.text(memory(capacity) - 6, _TOP - 10, f"a device has {show_bytes(capacity)}", "end strong")
    picture.curve([(memory(point.memory), time(point.seconds)) for point in front], "front")
    for looks, marked in (("front-dot", front), ("chosen", best[:1])):
        for point in marked:
            tip = f"{point.name}: {show_seconds(point.seconds)} a step, {show_bytes(point.memory)}"
            place = (memory(point.memory), time(point.seconds))
            picture.circle(*place, 4 if looks == "front-dot" else 8, looks, tip, (point.memory, point.seconds))
    _legend(picture, _TOP + _HEIGHT + 66)
    return str(picture)


def _reason(point: Point, capacity: float | None, reasons: Mapping[str, str]) -> str:
    """Why a layout does not fit: its own shortage, and the word on its whole family where there is one."""
    own = f"It lacks {show_bytes(point.memory - capacity)}" if capacity and point.memory > capacity else ""
    family = reasons.get(point.name, "")
    return ". ".join(part for part in (own, f"Its family at best: {family}" if family else "") if part)


def _scale(values: Sequence[float], begin: float, end: float) -> Scale:
    low, high = min(values), max(values)
    margin = (high / low) ** 0.04 if high > low else 1.2
    return Scale(low / margin, high * margin, begin, end, logarithmic=True)


def _legend(picture: Picture, y: float) -> None:
    x = float(_LEFT)
    for look, radius, words in (
        ("fits", 3.0, "fits"),
        ("unfit", 3.0, "does not fit (why: point at it)"),
        ("front-dot", 4.0, "Pareto front: nothing beats it in both"),
        ("chosen", 8.0, "the answer"),
    ):
        picture.circle(x + 6, y - 4, radius, look)
        picture.text(x + 20, y, words)
        x += 46 + 6.9 * len(words)
