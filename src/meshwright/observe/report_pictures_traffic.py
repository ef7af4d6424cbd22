"""The heat map of traffic between ranks, with the borders of nodes."""

from __future__ import annotations

import math

from meshwright.observe.report_svg import Picture, show_bytes
from meshwright.observe.report_traffic import Traffic

_SHADES = ("#fff7bc", "#fee391", "#fec44f", "#fe9929", "#ec7014", "#cc4c02", "#8c2d04")
"""One hue from light to dark (ColorBrewer YlOrBr), legible with every colour vision and in grey."""
_NOTHING = "var(--nothing)"
_LEFT, _TOP, _LARGEST = 90, 46, 520
_SEPARATE = 48
"""Up to this many rows, each is named."""


def traffic_picture(traffic: Traffic, count: int, what: str, per_node: int | None) -> str:
    """Senders down, receivers across, the shade is the logarithm of the bytes.

    Args:
        traffic: bytes by (sender, receiver) and axis.
        count: rows and columns.
        what: they are: rank or node.
        per_node: rows that share a node; None where that is not known.
    """
    totals = {pair: sum(axes.values()) for pair, axes in traffic.items() if sum(axes.values()) > 0}
    high, low = max(totals.values()), min(totals.values())
    title = f"Bytes sent in one step, {what} to {what}"
    (sender, receiver), most = max(totals.items(), key=lambda item: item[1])
    told = f"{len(totals)} pairs; the most is {show_bytes(most)} from {what} {sender} to {what} {receiver}"
    side = min(_LARGEST, max(220.0, 30.0 * count))
    picture = Picture("traffic", _TOP + max(side, 200.0) + 20, title, told)
    cell = side / count
    picture.rect(_LEFT, _TOP, side, side, _NOTHING)
    for at in (0.0, side):
        picture.line(_LEFT + at, _TOP, _LEFT + at, _TOP + side, "axis")
        picture.line(_LEFT, _TOP + at, _LEFT + side, _TOP + at, "axis")
    for pair, size in totals.items():
        axes = ", ".join(f"{axis} {show_bytes(part)}" for axis, part in traffic[pair].items() if part)
        inside = pair[0] == pair[1]
        where = f"inside {what} {pair[0]}" if inside else f"{what} {pair[0]} to {what} {pair[1]}"
        tip = f"{where}: {show_bytes(size)} a step ({axes})"
        x, y = _LEFT + pair[1] * cell, _TOP + pair[0] * cell
        picture.rect(x, y, cell, cell, _shade(size, low, high), tip, size)
    _names(picture, count, cell, what)
    if per_node and per_node < count:
        for index in range(0, count + 1, per_node):
            at = index * cell
            picture.line(_LEFT + at, _TOP, _LEFT + at, _TOP + side, "node")
            picture.line(_LEFT, _TOP + at, _LEFT + side, _TOP + at, "node")
    _shades(picture, low, high, _LEFT + side + 40)
    return str(picture)


def _shade(size: float, low: float, high: float) -> str:
    share = math.log(size / low) / math.log(high / low) if high > low * (1 + 1e-9) else 1.0
    return _SHADES[min(int(share * len(_SHADES)), len(_SHADES) - 1)]


def _names(picture: Picture, count: int, cell: float, what: str) -> None:
    step = 1 if count <= _SEPARATE else 8 if count <= 16 * 8 else 2 ** math.ceil(math.log2(count / 16))
    across = next(every for every in (1, 2, 4, 8, 16, 32, 64, 128, 256) if every * step * cell >= 22)
    for index in range(0, count, step):
        middle = (index + 0.5) * cell
        picture.text(_LEFT - 6, _TOP + middle + 4, str(index), "end small")
        if index % (across * step) == 0:
            picture.text(_LEFT + middle, _TOP - 6, str(index), "middle small")
    picture.text(_LEFT + count * cell / 2, _TOP - 24, f"receiving {what}", "middle")
    picture.upright(18, _TOP + count * cell / 2, f"sending {what}")


def _shades(picture: Picture, low: float, high: float, x: float) -> None:
    """What the shades mean, each with the least it stands for."""
    y = _TOP + 10
    picture.text(x, y, "bytes a step, at least", "strong")
    shades = len(_SHADES) if high > low * (1 + 1e-9) else 1
    for index in range(shades):
        row = y + 14 + 22 * (shades - 1 - index)
        picture.rect(x, row, 24, 18, _SHADES[index] if shades > 1 else _SHADES[-1])
        picture.text(x + 32, row + 13, show_bytes(low * (high / low) ** (index / shades)))
    row = y + 14 + 22 * shades + 6
    picture.rect(x, row, 24, 18, _NOTHING)
    picture.text(x + 32, row + 13, "nothing")
