"""A simulated schedule as text: one line a rank, time from left to right."""

from __future__ import annotations

import numpy as np

from meshwright.schedule.orders import KINDS
from meshwright.schedule.simulate import Simulation
from meshwright.schedule.units import scaled

_FILL = dict(zip(KINDS, "─═-~", strict=True))


def draw_text(simulation: Simulation, width: int = 100, unit: str = "s") -> str:
    """Every rank's actions along one time axis, with how much of the step it computes.

    An action begins with its letter (F forward, B backward, I and W its input and weight part; small letters: the
    rank's second, fourth, ... stage) and its micro-batch as far as there is room; blanks are idle time.

    Args:
        simulation: of ``simulate``.
        width: columns of the longest line's time axis.
        unit: of the simulation's times; seconds are shown in the fitting part of a second.
    """
    table, makespan = simulation.table, simulation.makespan
    scale = width / makespan if makespan else 0.0
    first, last = (np.rint(times * scale).astype(int) for times in (simulation.start, simulation.end))
    local = table.stage // table.pp
    margin = len(f"rank {table.pp - 1} ")
    lines = []
    for rank, row in enumerate(table.rows):
        line = [" "] * width
        for place, (kind, _, micro_batch) in enumerate(row, start=int(table.starts[rank])):
            room = last[place] - first[place]
            letter = kind.lower() if local[place] % 2 else kind
            line[first[place] : last[place]] = f"{letter}{micro_batch}".ljust(room, _FILL[kind])[:room]
        share = simulation.busy[rank] / makespan if makespan else 1.0
        lines.append(f"{f'rank {rank}':<{margin}}|{''.join(line)}| {share:4.0%} busy")
    end, shown = scaled(makespan, unit)
    axis = f"{' ' * margin}0{f'{end:.4g} {shown}':>{width}}"
    return "\n".join([*lines, axis]) + "\n"
