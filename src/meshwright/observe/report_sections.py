"""Sections of the report about ledgers: memory, time of a step, traffic, the pipeline, predicted against measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.job.layout_text import parse_layout
from meshwright.job.nodes import compressed_node_size
from meshwright.ledger.compare import Difference, compare
from meshwright.ledger.ledger import Ledger
from meshwright.observe.report import Gantt, Predicted, Records
from meshwright.observe.report_page import Cell, Section, Table
from meshwright.observe.report_pictures import (
    MEMORY_COLOURS,
    TIME_COLOURS,
    Bar,
    drawn,
    grouped,
    memory_parts,
    memory_picture,
    part_name,
    time_parts,
    time_picture,
)
from meshwright.observe.report_pictures_traffic import traffic_picture
from meshwright.observe.report_svg import show_ranks, show_seconds
from meshwright.observe.report_traffic import Traffic, by_node, rank_traffic
from meshwright.schedule.draw_svg import draw_svg
from meshwright.schedule.orders import KINDS
from meshwright.schedule.simulate import Simulation

_MOST_SQUARES = 128
"""Up to this many ranks the heat map is rank by rank, above node by node."""
_MOST_ACTIONS = 1000
"""A pipeline picture with more is drawn in two windows."""


def ledgers_of(records: Records, predicted: Predicted) -> list[Ledger]:
    """Predicted, traced, measured; those that there are."""
    found = ([predicted.ledger] if predicted.ledger is not None else []) + list(records.ledgers)
    return sorted(found, key=lambda ledger: ("predicted", "traced", "measured").index(ledger.source))


# -- memory -------------------------------------------------------------------------------------------


def memory_section(records: Records, predicted: Predicted) -> Section:
    """Bytes of each rank by category, from every source."""
    bars = [
        Bar((entry.rank,), ledger.source, parts, note)
        for ledger in ledgers_of(records, predicted)
        for entry in ledger.ranks
        for parts, note in [memory_parts(entry)]
        if parts
    ]
    title = "Memory of each rank"
    if not bars:
        return Section("memory", title, absent=_no_ledger(records, predicted))
    shown = grouped(bars)
    words = ["What each rank holds at its fullest moment. Ranks with the same figures share a line."]
    partial = sorted({(bar.source, bar.note) for bar in shown if bar.note})
    words += [f"The {source} bars are {note}." for source, note in partial]
    if predicted.capacity is None:
        words.append(f"No capacity is drawn: {predicted.absent.get('capacity', 'nothing says which machines')}.")
    if len(drawn(shown)) < len(shown):
        words.append(f"The fullest {len(drawn(shown))} of {len(shown)} are drawn; the table has all.")
    return Section(
        "memory", title, words,
        pictures=[memory_picture(shown, predicted.capacity)],
        tables=[_bars_table("memory", shown, MEMORY_COLOURS, "bytes")],
        data={"unit": "bytes", "capacity": predicted.capacity, "bars": _bars_data(shown)},
    )  # fmt: skip


def _bars_table(kind: str, bars: Sequence[Bar], colours: Mapping[str, str], unit: str) -> Table:
    names = [name for name in colours if any(name in bar.parts for bar in bars)]
    names += sorted({name for bar in bars for name in bar.parts if name not in colours})
    rows: list[Sequence[Cell]] = [
        [show_ranks(bar.ranks), bar.source, *(bar.parts.get(name, 0.0) for name in names), bar.total] for bar in bars
    ]
    columns = ["ranks", "source", *(part_name(kind, name) for name in names), "together"]
    return Table(f"{unit} of one rank", columns, rows)


def _bars_data(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    return [
        {"ranks": list(bar.ranks), "source": bar.source, "parts": dict(bar.parts), "note": bar.note} for bar in bars
    ]


def _no_ledger(records: Records, predicted: Predicted) -> str:
    """Why there is no ledger to draw."""
    why = predicted.absent.get("ledger", "")
    here = f"{records.source.name} has no ledger.json" if records.is_run else ""
    return "; ".join(part for part in (here, f"nothing is predicted: {why}" if why else "") if part) or "no ledger"


# -- time of a step -----------------------------------------------------------------------------------


def time_section(records: Records, predicted: Predicted) -> Section:
    """Seconds of a step by what they went into: measured of each rank, predicted of each pipeline rank's."""
    bars = [
        Bar((entry.rank,), ledger.source, time_parts(entry.spends))
        for ledger in ledgers_of(records, predicted)
        for entry in ledger.ranks
        if entry.spends is not None
    ]
    title = "Where the time of a step goes"
    if not bars:
        why = predicted.absent.get("time", "")
        here = f"{records.source.name} has no ledger.json with times" if records.is_run else ""
        return Section("time", title, absent="; ".join(part for part in (here, why) if part) or "no step was timed")
    shown = grouped(bars)
    words = [
        "One step of each rank: compute by phase, communication during which nothing was computed by axis, waiting for "
        "the slowest rank of a group, the pipeline's bubble, data, and the rest."
    ]
    steps = sorted({ledger.step for ledger in records.ledgers if ledger.step})
    if steps:
        words.append(f"Measured in step {steps[0]}; timing every part makes that step slower than the others.")
    words += [predicted.time_note] if predicted.time_note else []
    return Section(
        "time", title, words,
        pictures=[time_picture(shown)],
        tables=[_bars_table("time", shown, TIME_COLOURS, "seconds")],
        data={"unit": "seconds", "bars": _bars_data(shown)},
    )  # fmt: skip


# -- traffic ------------------------------------------------------------------------------------------


def traffic_section(records: Records, predicted: Predicted) -> Section:
    """Who sends how much to whom."""
    title = "Traffic between ranks"
    found = ledgers_of(records, predicted)
    if not found:
        return Section("traffic", title, absent=_no_ledger(records, predicted))
    ledger = found[-1]
    if ledger.world == 1:
        return Section("traffic", title, absent="one rank sends nothing")
    layout = parse_layout(ledger.layout)
    node_size = None if records.job is None else compressed_node_size(records.job.with_layout(layout))
    traffic = rank_traffic(ledger, layout, node_size)
    if not any(size for axes in traffic.values() for size in axes.values()):
        return Section("traffic", title, absent=f"the {ledger.source} ledger has no sends")
    node, what, count, shown = predicted.ranks_per_node, "rank", ledger.world, traffic
    if ledger.world > _MOST_SQUARES:
        per = node or 8
        what = "node" if node else f"block of {per} ranks"
        count, shown = -(-ledger.world // per), by_node(traffic, per)
    shares = (
        "each rank to the next of its group, as NCCL's rings do"
        if ledger.backend == "nccl"
        else "each rank to all others of its group in equal parts, as the program exchanges them on CPUs"
    )
    words = [
        f"Bytes on the wire in one step, from the {ledger.source} ledger. A collective's bytes are drawn from "
        f"{shares}; pipeline messages go to the rank of the next or previous stage.",
        "Lines part nodes." if node and node < ledger.world and what == "rank" else "",
        "The diagonal is what stays inside." if what != "rank" else "",
        "" if node else "How many ranks share a node is not recorded, so no node borders are drawn.",
    ]
    pictures = [traffic_picture(shown, count, what, node if what == "rank" else None)]
    tables = [_axis_table(ledger, traffic, node), _pairs_table(shown, what)]
    data = {
        "unit": "bytes",
        "ranks_per_node": node,
        "rows": what,
        "pairs": [[sender, receiver, axes] for (sender, receiver), axes in shown.items()],
    }
    return Section("traffic", title, [word for word in words if word], pictures, tables, data)


def _axis_table(ledger: Ledger, traffic: Traffic, node: int | None) -> Table:
    """By axis: bytes of all ranks, how much of it leaves a node, and the messages of one rank."""
    inside: dict[str, float] = defaultdict(float)
    across: dict[str, float] = defaultdict(float)
    for (sender, receiver), axes in traffic.items():
        for axis, size in axes.items():
            leaves = node is not None and sender // node != receiver // node
            (across if leaves else inside)[axis] += size
    messages: dict[str, int] = defaultdict(int)
    for entry in ledger.ranks:
        for send in entry.sends:
            messages[send.axis] += send.messages
    rows: list[Sequence[Cell]] = [
        [axis, inside[axis] + across[axis], None if node is None else across[axis], messages[axis]]
        for axis in sorted(messages, key=lambda axis: -(inside[axis] + across[axis]))
    ]
    return Table(
        "By mesh axis, all ranks of the ledger together", ["axis", "bytes", "of it between nodes", "messages"], rows
    )


def _pairs_table(traffic: Traffic, what: str) -> Table:
    rows: list[Sequence[Cell]] = [
        [sender, receiver, ", ".join(f"{axis} {size:,.0f}" for axis, size in axes.items() if size), sum(axes.values())]
        for (sender, receiver), axes in traffic.items()
        if sum(axes.values())
    ]
    rows.sort(key=lambda row: (-float(row[3] or 0), row[0], row[1]))
    return Table("Pairs, the most first", [f"from {what}", f"to {what}", "bytes by axis", "bytes"], rows)


# -- pipeline -----------------------------------------------------------------------------------------


def pipeline_section(predicted: Predicted) -> Section:
    """The schedule in time."""
    title = "Pipeline schedule"
    if not predicted.gantts:
        return Section("pipeline", title, absent=predicted.absent.get("gantt", "no job says what is scheduled"))
    return Section(
        "pipeline", title,
        words=[gantt.words for gantt in predicted.gantts],
        pictures=[picture for gantt in predicted.gantts for picture in _gantt_pictures(gantt)],
        tables=[_rank_table(gantt) for gantt in predicted.gantts],
        data=[_gantt_data(gantt) for gantt in predicted.gantts],
    )  # fmt: skip


def _gantt_pictures(gantt: Gantt) -> Iterator[str]:
    """The whole schedule, or its beginning and its end where it has too many actions to see."""
    simulation = gantt.simulation
    actions = len(simulation.start)
    if actions <= _MOST_ACTIONS:
        yield draw_svg(simulation, title=gantt.title)
        return
    # At least until the pipeline has filled: the first rank has its first backward behind it.
    first = simulation.end[(simulation.table.rank == 0) & (simulation.table.kind != KINDS.index("F"))]
    share = simulation.makespan * _MOST_ACTIONS / actions
    length = min(max(share / 2, 1.1 * float(first.min())), 6 * share, simulation.makespan / 2)
    yield draw_svg(simulation, title=f"{gantt.title}: the beginning", window=(0.0, length))
    yield draw_svg(
        simulation, title=f"{gantt.title}: the end", window=(simulation.makespan - length, simulation.makespan)
    )


def _rank_table(gantt: Gantt) -> Table:
    one = gantt.simulation
    parts = (one.busy, one.bubble, one.exposed)
    rows: list[Sequence[Cell]] = [
        [rank, *(float(part[rank]) for part in parts), f"{float(one.bubble[rank]) / one.makespan:.1%}"]
        for rank in range(one.table.pp)
    ]
    columns = ["pipeline rank", "computing (s)", "bubble (s)", "messages (s)", "bubble / step"]
    return Table(f"{gantt.title}; all {show_seconds(one.makespan)}", columns, rows)


def _gantt_data(gantt: Gantt) -> dict[str, Any]:
    one: Simulation = gantt.simulation
    actions = zip(
        one.table.rank.tolist(), one.table.kind.tolist(), one.table.stage.tolist(), one.table.micro_batch.tolist(),
        np.round(one.start, 9).tolist(), np.round(one.end, 9).tolist(), strict=True,
    )  # fmt: skip
    return {
        "title": gantt.title,
        "schedule": one.table.schedule,
        "makespan": one.makespan,
        "columns": ["pipeline rank", "kind", "stage", "micro-batch", "start (s)", "end (s)"],
        "actions": [[rank, KINDS[kind], *rest] for rank, kind, *rest in actions],
    }


# -- predicted against measured -----------------------------------------------------------------------


def compare_section(records: Records, predicted: Predicted) -> Section:
    """The same quantity from every source: the rank on which they differ most."""
    title = "Predicted against measured"
    found = ledgers_of(records, predicted)
    if len(found) < 2 and predicted.step_time is None:
        why = predicted.absent.get("ledger") or "there is one ledger, and two are needed"
        return Section("compare", title, absent=why if records.is_run else "a plan has nothing measured")
    if not records.is_run:
        return Section("compare", title, absent="a plan has nothing measured")
    rows = [*_speeds(records, predicted), *(_difference(one) for one in _worst(found))]
    if not rows:
        return Section("compare", title, absent="the sources share no quantity")
    sources = ("predicted", "traced", "measured")
    words = ["Bytes, FLOPs and seconds of one rank and step; of all ranks, the one that differs most is shown."]
    table = Table("Relative difference is over the largest", ["quantity", "rank", *sources, "difference"], rows)
    data = [dict(zip(("quantity", "rank", *sources, "difference"), row, strict=True)) for row in rows]
    return Section("compare", title, words, tables=[table], data=data, open_tables=True)


def _worst(ledgers: Sequence[Ledger]) -> list[Difference]:
    """Of every quantity the rank on which it differs most; without what a source did not work out."""
    unknown = {ledger.source for ledger in ledgers if not any(entry.stores.peak for entry in ledger.ranks)}
    worst: dict[str, Difference] = {}
    for one in compare(ledgers):
        if unknown & one.values.keys() and one.quantity in ("stores: activations", "stores: temporary", "stores: peak"):
            continue
        if not any(one.values.values()):
            continue
        if one.quantity not in worst or one.relative > worst[one.quantity].relative:
            worst[one.quantity] = one
    return list(worst.values())


def _difference(one: Difference) -> list[Cell]:
    values = [one.values.get(source) for source in ("predicted", "traced", "measured")]
    return [one.quantity, one.rank, *values, f"{one.relative:.2%}"]


def _speeds(records: Records, predicted: Predicted) -> Iterator[list[Cell]]:
    """The planner's step time and peak against the run's."""
    steps = [record["step_seconds"] for record in steady(records)]
    if predicted.step_time is not None and steps:
        middle = sorted(steps)[len(steps) // 2]
        yield _pair("step time (s): median of steady steps", predicted.step_time, middle)
    measured = [ledger.fullest.stores.peak for ledger in records.ledgers if ledger.source == "measured"]
    if predicted.peak is not None and any(measured):
        yield _pair("peak memory of the fullest rank (bytes), by the planner", predicted.peak, float(max(measured)))


def _pair(words: str, predicted: float, measured: float) -> list[Cell]:
    relative = abs(predicted - measured) / max(predicted, measured)
    return [words, None, predicted, None, measured, f"{relative:.2%}"]


def steady(records: Records) -> list[Mapping[str, Any]]:
    """Records of steps after the first two that were not slowed down by recording the ledger."""
    slowed = recorded_steps(records)
    timed = [record for record in records.metrics if isinstance(record.get("step_seconds"), (int, float))]
    return [record for record in timed[2:] if record.get("step") not in slowed]


def recorded_steps(records: Records) -> set[int]:
    """The steps in which the ledger was taken: one is counted, the next is timed."""
    return {step for ledger in records.ledgers if ledger.step for step in (ledger.step - 1, ledger.step)}
