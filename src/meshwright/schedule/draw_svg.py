"""A simulated schedule as one SVG picture that needs nothing beside it."""

from __future__ import annotations

from html import escape

import numpy as np

from meshwright.schedule.orders import KINDS
from meshwright.schedule.simulate import Simulation
from meshwright.schedule.units import scaled

COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#f0a6ca", "W": "#5fc9a4"}
"""By kind; told apart with every common colour blindness (after Okabe and Ito 2008), dark text is legible on all."""
NAMES = {"F": "forward", "B": "backward", "I": "backward, input part", "W": "backward, weight part"}
_LEFT, _RIGHT, _TOP, _ROW, _BAR = 62, 18, 34, 26, 20
_STYLE = "".join(
    f".schedule {rule}"  # scoped: the picture may stand in a page
    for rule in (
        "text{fill:#1a202c;font:12px system-ui,sans-serif}",
        "text.n{font-size:10px;text-anchor:middle;pointer-events:none}",
        "text.t{text-anchor:middle}",
        "text.r{text-anchor:end}",
        "text.h{font-weight:600;font-size:13px}",
        ".g{stroke:#cbd5e0}",
        ".a{stroke:#33415c}",
        "rect.p{stroke:#33415c;stroke-width:.5}",
    )
)


def draw_svg(
    simulation: Simulation,
    title: str = "",
    width: int = 960,
    unit: str = "s",
    window: tuple[float, float] | None = None,
) -> str:
    """Every rank's actions along one time axis; pointing at one names it and its times.

    The number in a bar is its micro-batch. A rank's later stages are hatched, the more the later.

    Args:
        simulation: of ``simulate``.
        title: above the picture; absent: the schedule and its sizes.
        width: of the picture, in pixels.
        unit: of the simulation's times; seconds are shown in the fitting part of a second.
        window: draw only what lies between these times (long schedules have many thousand bars).
    """
    table = simulation.table
    begin, end = window or (0.0, simulation.makespan)
    title = title or (
        f"{table.schedule}: {table.pp} ranks, {table.virtual} stage{'s' * (table.virtual > 1)} a rank, "
        f"{table.micro_batches} micro-batches"
    )
    scale = (width - _LEFT - _RIGHT) / ((end - begin) or 1.0)
    bottom = _TOP + table.pp * _ROW
    legend, lines = _legend(simulation, bottom + 54, width)
    height = bottom + 54 + 20 * lines
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" class="schedule">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        _hatches(table.virtual),
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="h" x="{_LEFT}" y="20">{escape(title)}</text>',
        *_axis(begin, end, scale, bottom, unit),
        *(
            f'<text class="r" x="{_LEFT - 8}" y="{_TOP + rank * _ROW + 15}">rank {rank}</text>'
            for rank in range(table.pp)
        ),
        *_bars(simulation, begin, end, scale, unit),
        *legend,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bars(simulation: Simulation, begin: float, end: float, scale: float, unit: str) -> list[str]:
    table = simulation.table
    bars = []
    for place in np.flatnonzero((simulation.end > begin) & (simulation.start < end)):
        kind, stage, index = KINDS[table.kind[place]], table.stage[place], table.micro_batch[place]
        start, stop = float(simulation.start[place]), float(simulation.end[place])
        left, right = (_LEFT + (min(max(time, begin), end) - begin) * scale for time in (start, stop))
        top = _TOP + int(table.rank[place]) * _ROW
        local = stage // table.pp
        box = f'x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{_BAR}"'
        told = f"{NAMES[kind]} of micro-batch {index} in stage {stage}: {_time(start, unit)} to {_time(stop, unit)}"
        bars.append(f'<rect class="p" {box} fill="{COLOURS[kind]}"><title>{escape(told)}</title></rect>')
        if local:
            bars.append(f'<rect {box} fill="url(#stage-{local})" pointer-events="none"/>')
        if right - left >= 4 + 6 * len(str(index)):
            bars.append(f'<text class="n" x="{(left + right) / 2:.1f}" y="{top + 14}">{index}</text>')
    return bars


def _time(time: float, unit: str) -> str:
    value, shown = scaled(time, unit)
    return f"{value:.4g} {shown}"


def _axis(begin: float, end: float, scale: float, bottom: int, unit: str) -> list[str]:
    """Grid lines at round times, and what they are times of."""
    largest, shown = scaled(end, unit)
    factor = largest / end if end else 1.0
    first, last = begin * factor, end * factor
    rough = max((last - first) / 9, 1e-12)
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough)
    parts = []
    for value in np.arange(np.ceil(first / step) * step, last + step * 1e-9, step):
        x = _LEFT + (value - first) / factor * scale
        parts.append(f'<line class="g" x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text class="t" x="{x:.1f}" y="{bottom + 15}">{value:g}</text>')
    right = _LEFT + (end - begin) * scale
    parts.append(f'<line class="a" x1="{_LEFT}" y1="{bottom}" x2="{right:.1f}" y2="{bottom}"/>')
    parts.append(f'<text class="t" x="{(_LEFT + right) / 2:.1f}" y="{bottom + 32}">time ({escape(shown)})</text>')
    return parts


def _hatches(virtual: int) -> str:
    """One pattern for each later stage of a rank: closer lines."""
    patterns = (
        f'<pattern id="stage-{local}" width="{gap}" height="{gap}" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="{gap}" stroke="#1a202c" '
        'stroke-opacity=".35"/></pattern>'
        for local, gap in ((local, max(2.5, 9.0 - 2.0 * local)) for local in range(1, virtual))
    )
    return f"<defs>{''.join(patterns)}</defs>"


def _legend(simulation: Simulation, top: int, width: int) -> tuple[list[str], int]:
    """What colours and hatches mean, in as many lines as they take; blank is idle."""
    table = simulation.table
    entries = [(NAMES[kind], COLOURS[kind], 0) for code, kind in enumerate(KINDS) if (table.kind == code).any()]
    entries += [(f"stage {local + 1} of the rank", "#fff", local) for local in range(1, table.virtual)]
    parts, x, line = [], _LEFT, 0
    for name, colour, local in entries:
        long = 34 + 7 * len(name)
        if x + long > width and x > _LEFT:
            x, line = _LEFT, line + 1
        box = f'x="{x}" y="{top + 20 * line - 11}" width="16" height="13"'
        parts.append(f'<rect class="p" {box} fill="{colour}"/>')
        if local:
            parts.append(f'<rect {box} fill="url(#stage-{local})"/>')
        parts.append(f'<text x="{x + 22}" y="{top + 20 * line}">{escape(name)}</text>')
        x += long
    return parts, line + 1
