"""Stacked bars of the report: memory of ranks by category, and where their step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.ledger.ledger import CATEGORIES, RankLedger, Spends
from meshwright.observe.report_svg import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WIDTH,
    YELLOW,
    Picture,
    Scale,
    byte_unit,
    draw_legend,
    draw_x_axis,
    legend_lines,
    second_unit,
    show_bytes,
    show_ranks,
    show_seconds,
)

MEMORY_COLOURS: Mapping[str, str] = {
    "parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN, "activations": PURPLE, "temporary": SKY,
    "runtime": GREY,
}  # fmt: skip
TIME_COLOURS: Mapping[str, str] = {
    "forward": BLUE, "backward": SKY, "recompute": PURPLE, "optimizer": GREEN, "other compute": BLACK,
    "tp": ORANGE, "pp": VERMILION, "shard": YELLOW, "replicate": "#b8ad00", "dp": "#b8ad00", "world": "#8c4a00",
    "intra": YELLOW, "inter": "#b8ad00",
    "waiting": "#7a3b5e", "bubble": LIGHT, "data": "#004c36", "checkpoint": "#003a5c", "other": GREY,
}  # fmt: skip
_AXES = ("tp", "pp", "shard", "replicate", "intra", "inter", "dp", "world")
_LEFT, _BAR, _MOST = 230, 15, 24
_LETTERS = 20
"""Of a name, left of the sources."""
_FAR = 3.0
"""A capacity beyond so many times the fullest rank is told, not drawn: bars would be slivers."""


@dataclass(frozen=True)
class Bar:
    """One stacked bar: of which ranks, from which source, and its parts in bytes or seconds."""

    ranks: tuple[int, ...]
    source: str
    parts: Mapping[str, float]
    note: str = ""

    @property
    def total(self) -> float:
        """The parts together."""
        return sum(self.parts.values())


def memory_parts(entry: RankLedger) -> tuple[dict[str, float], str]:
    """What one rank holds at its fullest moment, and a note where only a part is known."""
    stores = entry.stores
    if stores.at_peak:
        return {str(name): float(stores.at_peak[name]) for name in CATEGORIES if stores.at_peak.get(name)}, ""
    own: dict[str, float] = {name: float(getattr(stores, name)) for name in CATEGORIES if getattr(stores, name)}
    if not stores.peak:
        return own, "without what comes and goes in a step"
    return own, "each category at its own highest"


def time_parts(spends: Spends) -> dict[str, float]:
    """Where one rank's step went: compute by phase, exposed communication by axis, waiting and the rest."""
    parts = {name: spends.compute.get(name, 0.0) for name in ("forward", "backward", "recompute", "optimizer")}
    known = sum(parts.values())
    parts["other compute"] = sum(spends.compute.values()) - known
    parts |= {axis: spends.communication.get(axis, 0.0) for axis in _AXES}
    parts |= {axis: seconds for axis, seconds in spends.communication.items() if axis not in _AXES}
    parts |= {"waiting": spends.waiting, "bubble": spends.bubble, "data": spends.data}
    parts |= {"checkpoint": spends.checkpoint, "other": spends.other}
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def grouped(bars: Sequence[Bar]) -> list[Bar]:
    """Ranks with the same numbers share a bar; by first rank, then in the order the sources came."""
    sources = list(dict.fromkeys(bar.source for bar in bars))
    by_rank: dict[int, dict[str, Bar]] = {}
    for bar in bars:
        for rank in bar.ranks:
            by_rank.setdefault(rank, {})[bar.source] = bar
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(by_rank):
        one = by_rank[rank]
        key = tuple((name, tuple(one[name].parts.items())) if name in one else name for name in sources)
        alike.setdefault(key, []).append(rank)
    found = []
    for ranks in alike.values():
        for name in sources:
            if name in by_rank[ranks[0]]:
                first = by_rank[ranks[0]][name]
                found.append(Bar(tuple(ranks), name, first.parts, first.note))
    return found


def memory_picture(bars: Sequence[Bar], capacity: float | None) -> str:
    """Bytes of each rank at its fullest moment against what a device has."""
    title = "Memory of each rank at its fullest moment, by category"
    return _stacked("memory", title, bars, MEMORY_COLOURS, capacity)


def time_picture(bars: Sequence[Bar]) -> str:
    """Seconds of one step of each rank by what they went into."""
    return _stacked("time", "Where the time of one step goes", bars, TIME_COLOURS, None)


def part_name(kind: str, part: str) -> str:
    """How a legend and a table call a part."""
    return f"exposed communication: {part}" if kind == "time" and part in _AXES else part


def drawn(bars: Sequence[Bar]) -> list[Bar]:
    """Those that a picture shows: all, or the longest where they are too many."""
    if len(bars) <= _MOST:
        return list(bars)
    kept = sorted(range(len(bars)), key=lambda index: -bars[index].total)[:_MOST]
    return [bars[index] for index in sorted(kept)]


def _stacked(name: str, title: str, bars: Sequence[Bar], colours: Mapping[str, str], capacity: float | None) -> str:
    shown = drawn(bars)
    parts = [part for part in colours if any(part in bar.parts for bar in shown)]
    parts += sorted({part for bar in shown for part in bar.parts if part not in colours})
    entries = [(part_name(name, part), colours.get(part, GREY)) for part in parts]
    new_rank = [index > 0 and bar.ranks != shown[index - 1].ranks for index, bar in enumerate(shown)]
    top = 26.0
    bottom = top + len(shown) * (_BAR + 4) + 6 * sum(new_rank) + 4
    height = bottom + 52 + 20 * legend_lines(entries, _LEFT)
    tell = show_bytes if name == "memory" else show_seconds
    fullest = max(shown, key=lambda bar: bar.total)
    told = f"{show_ranks(fullest.ranks)} ({fullest.source}) has most: {tell(fullest.total)}"
    told += f"; a device has {tell(capacity)}" if capacity else ""
    picture = Picture(name, height, title, told)
    near = capacity is not None and capacity <= _FAR * fullest.total
    largest = max(fullest.total, capacity or 0.0) if near else fullest.total
    unit = byte_unit(largest) if name == "memory" else second_unit(largest)
    scale = Scale(0.0, largest * 1.04, _LEFT, WIDTH - 30)
    draw_x_axis(picture, scale, top - 6, bottom, unit, "memory" if name == "memory" else "time in one step")
    y = top
    for index, bar in enumerate(shown):
        y += 6 if new_rank[index] else 0
        _bar(picture, name, bar, parts, colours, scale, y, named=index == 0 or new_rank[index])
        y += _BAR + 4
    if capacity:
        words = f"capacity {tell(capacity)}"
        if near:
            x = scale(capacity)
            picture.line(x, top - 8, x, bottom, "limit", words)
            picture.text(x, top - 12, words, "end strong" if x > WIDTH / 2 else "strong")
        else:
            words += f": far to the right, {capacity / fullest.total:.3g} times the fullest"
            picture.text(WIDTH - 30, top - 12, words, "end strong")
    draw_legend(picture, _LEFT, bottom + 56, entries)
    return str(picture)


def _bar(
    picture: Picture, name: str, bar: Bar, parts: Sequence[str], colours: Mapping[str, str], scale: Scale, y: float,
    *, named: bool,
) -> None:  # fmt: skip
    tell = show_bytes if name == "memory" else show_seconds
    if named:
        picture.text(6, y + 12, show_ranks(bar.ranks, _LETTERS), "strong")
    picture.text(_LEFT - 8, y + 12, bar.source, "end small")
    begin = 0.0
    for part in parts:
        value = bar.parts.get(part, 0.0)
        if not value:
            continue
        tip = f"{show_ranks(bar.ranks)}, {bar.source}: {part_name(name, part)} {tell(value)} of {tell(bar.total)}"
        x = scale(begin)
        picture.rect(x, y, scale(begin + value) - x, _BAR, colours.get(part, GREY), tip, value)
        begin += value
