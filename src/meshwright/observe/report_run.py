"""Sections of the report about a search and about a run over time: layouts, losses, speed, goodput; and the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.observe.report import Predicted, Records
from meshwright.observe.report_page import Cell, Page, Section, Table
from meshwright.observe.report_pictures_search import Point, search_picture
from meshwright.observe.report_pictures_steps import (
    Attempt,
    Happened,
    Series,
    events_picture,
    loss_picture,
    rate_picture,
)
from meshwright.observe.report_sections import (
    compare_section,
    memory_section,
    pipeline_section,
    recorded_steps,
    steady,
    time_section,
    traffic_section,
)
from meshwright.observe.report_svg import show_bytes, show_seconds
from meshwright.plan.answer import PlannedLayout, Rejected

_MOST_STEPS = 500
"""Points of a line; longer runs are drawn by every k-th step."""


def build_page(records: Records, predicted: Predicted) -> Page:
    """Everything that the records hold, in the order a person asks."""
    sections = [
        search_section(records, predicted),
        memory_section(records, predicted),
        time_section(records, predicted),
        pipeline_section(predicted),
        traffic_section(records, predicted),
        compare_section(records, predicted),
        loss_section(records),
        rate_section(records),
        goodput_section(records),
    ]
    name = records.source.resolve().name
    title = f"Run {name}" if records.is_run else f"Plan {name}"
    return Page(title, list(_facts(records, predicted)), sections, list(_notes(records, predicted)))


def _facts(records: Records, predicted: Predicted) -> Iterator[tuple[str, str]]:
    plan, job, summary = records.plan, records.job, records.summary
    if name := (job.model.name if job is not None else "") or (plan.model if plan is not None else ""):
        yield "model", name
    layout = _layout(records)
    if layout:
        yield "layout", short(layout)
    if plan is not None:
        yield "cluster", plan.cluster
    if job is not None:
        yield "global batch", f"{job.batch.global_size} sequences of {job.data.sequence_length} tokens"
    if predicted.capacity is not None:
        yield "memory of a device", show_bytes(predicted.capacity)
    if predicted.step_time is not None:
        yield "step, predicted", show_seconds(predicted.step_time)
    if timed := [record["step_seconds"] for record in steady(records)]:
        yield "step, measured", show_seconds(sorted(timed)[len(timed) // 2])
    for key, words in (("tokens_per_second", "tokens/s"), ("useful_speedup", "useful speed-up"), ("loss", "loss")):
        if isinstance(summary.get(key), (int, float)):
            yield words, f"{summary[key]:,.4g}" if summary[key] < 1e4 else f"{summary[key]:,.0f}"
    if summary.get("outcome"):
        yield "outcome", str(summary["outcome"])


def _layout(records: Records) -> str:
    if records.ledgers:
        return records.ledgers[-1].layout
    if records.is_run and records.job is not None:
        return str(records.job.layout)
    return records.plan.layouts[0].layout if records.plan is not None and records.plan.layouts else ""


def _notes(records: Records, predicted: Predicted) -> Iterator[str]:
    if records.missing:
        yield f"Not in the run directory: {', '.join(records.missing)}."
    for assumed in dict.fromkeys((*(records.plan.basis if records.plan is not None else ()), *predicted.basis)):
        yield f"Assumed of the cluster: {assumed}."
    if predicted.ledger is not None:
        yield "Predicted ledgers are computed anew from the job when the report is written."
    yield "1 MB is 1,000,000 bytes. Each section's numbers are in the file as JSON too, which runs nothing."


def short(layout: str) -> str:
    """A layout without its placement, which is as long as there are ranks, and with a long list of stages cut."""
    words = [word for word in layout.split() if not word.startswith("placement=")]
    for index, word in enumerate(words):
        counts = word.removeprefix("stages=").split(",")
        if word.startswith("stages=") and len(counts) > 8:
            words[index] = f"stages={','.join(counts[:3])},...,{counts[-1]}"
    return " ".join(words)


# -- search -------------------------------------------------------------------------------------------


def search_section(records: Records, predicted: Predicted) -> Section:
    """Every sampled layout in time and memory, the answer, and why the other families are not it."""
    title = "The search"
    plan = records.plan
    if plan is None:
        return Section("search", title, absent=f"{records.source.name} has no plan.json: its layout was given")
    front = [_point(entry) for entry in plan.pareto]
    best = [_point(entry) for entry in plan.layouts]
    points = [(Point(seconds, memory, family), fits) for seconds, memory, fits, family in plan.points]
    fitting = [one for one, entry in zip(best, plan.layouts, strict=True) if entry.fits]
    reasons = {line.family: line.reason for line in plan.rejected}
    words = [
        f"{plan.searched:,} layouts were evaluated in {plan.seconds:.1f} s; {plan.illegal:,} break a rule. "
        f"{len(points)} of them are drawn." if points else "One layout was evaluated; nothing was searched.",
        f"Placement: {plan.placement}" if plan.placement else "",
        "The sample and the front are by the search's closed forms; the answer's memory is the predicted ledger's."
        if front
        else "",
    ]  # fmt: skip
    pictures = [search_picture(points, front, fitting or best, predicted.capacity, reasons)] if points else []
    behind = plan.model_dump(include={"points", "pareto", "layouts", "rejected"})
    return Section(
        "search", title, [word for word in words if word], pictures,
        tables=[_layout_table("Fastest first", plan.layouts), _layout_table("Pareto front", plan.pareto),
                _rejected_table(plan.rejected), _point_table(points)],
        data={"capacity": predicted.capacity, **behind},
        open_tables=not points,
    )  # fmt: skip


def _point(entry: PlannedLayout) -> Point:
    return Point(entry.step_time_s, float(entry.peak_memory_bytes), short(entry.layout))


def _layout_table(caption: str, entries: Sequence[PlannedLayout]) -> Table:
    rows: list[Sequence[Cell]] = [
        [short(entry.layout), "yes" if entry.fits else "no", entry.step_time_s, entry.tokens_per_s,
         f"{entry.mfu:.1%}", entry.peak_memory_bytes, entry.fullest_rank, entry.binding]
        for entry in entries
    ]  # fmt: skip
    columns = ["layout", "fits", "step (s)", "tokens/s", "MFU", "peak (bytes)", "fullest rank", "binds"]
    return Table(caption, columns, rows)


def _rejected_table(lines: Sequence[Rejected]) -> Table:
    rows: list[Sequence[Cell]] = [[line.family, line.layouts, line.reason, short(line.closest or "")] for line in lines]
    return Table("Rejected families", ["family", "layouts", "why", "its best, or closest to fitting"], rows)


def _point_table(points: Sequence[tuple[Point, bool]]) -> Table:
    rows: list[Sequence[Cell]] = [
        [point.name, "yes" if fits else "no", point.seconds, point.memory] for point, fits in points
    ]
    return Table("The sample that is drawn", ["family", "fits", "step (s)", "memory (bytes)"], rows)


# -- steps --------------------------------------------------------------------------------------------


def _series(records: Records, key: str) -> tuple[list[tuple[int, float]], int]:
    """A figure over the steps, thinned to what can be drawn, and by how much."""
    found = [
        (int(record["step"]), float(record[key]))
        for record in records.metrics
        if isinstance(record.get("step"), int) and isinstance(record.get(key), (int, float))
    ]
    every = -(-len(found) // _MOST_STEPS) or 1
    return found[::-1][::every][::-1], every


def _series_table(caption: str, name: str, series: Series) -> Table:
    return Table(caption, ["step", name], [[step, value] for step, value in series])


def _thinned(every: int) -> list[str]:
    return [f"Every {every}th step is drawn."] if every > 1 else []


def loss_section(records: Records) -> Section:
    """Training and validation loss over the steps."""
    title = "Loss"
    training, every = _series(records, "loss")
    validation, _ = _series(records, "validation_loss")
    if not training and not validation:
        return Section("loss", title, absent=_no_metrics(records, "losses"))
    floor = records.summary.get("validation_unigram_entropy")
    floor = float(floor) if isinstance(floor, (int, float)) and validation else None
    words = _thinned(every)
    if floor:
        words.append(
            f"Unigram entropy of the validation tokens: {floor:.4g} nats; a model below it has learned more than "
            "how often each token comes."
        )
    tables = [_series_table("Training loss, nats per token", "loss", training)]
    if validation:
        tables.append(_series_table("Validation loss, nats per token", "loss", validation))
    data = {"training": training, "validation": validation, "unigram_entropy": floor}
    return Section("loss", title, words, [loss_picture(training, validation, floor)], tables, data)


def rate_section(records: Records) -> Section:
    """Tokens a second over the steps."""
    rates, every = _series(records, "tokens_per_second")
    if not rates:
        return Section("rate", "Tokens a second", absent=_no_metrics(records, "speeds"))
    shown = {step for step, _ in rates}
    recorded = sorted(step for step in recorded_steps(records) if step in shown)
    words = [*_thinned(every), "Valid target tokens of all ranks."]
    if recorded:
        words.append("Dotted: steps slowed down because the ledger was recorded in them.")
    tables = [_series_table("Valid tokens a second", "tokens/s", rates)]
    return Section("rate", "Tokens a second", words, [rate_picture(rates, recorded)], tables, {"rates": rates})


def _no_metrics(records: Records, what: str) -> str:
    if not records.is_run:
        return "a plan has no steps"
    if "metrics.jsonl" in records.missing:
        return f"{records.source.name} has no metrics.jsonl"
    return f"metrics.jsonl holds no {what}"


# -- goodput ------------------------------------------------------------------------------------------


def goodput_section(records: Records) -> Section:
    """Which share of the run's time went into steps that count."""
    title = "Goodput"
    if not records.is_run:
        return _expected_goodput(records)
    events = [one for one in records.events if isinstance(one.get("time"), (int, float)) and "event" in one]
    if not events:
        what = "events.jsonl" if "events.jsonl" in records.missing else "events"
        return Section("goodput", title, absent=f"{records.source.name} has no {what}")
    first = float(events[0]["time"])
    happened = [Happened(float(one["time"]) - first, str(one["event"]), int(one.get("step") or 0)) for one in events]
    attempts = _attempts(happened, [float(one["time"]) - first for one in records.metrics if "time" in one])
    rows, share = _goodput_rows(records, events, attempts)
    words = [
        f"{share:.1%} of the time from the first start to the last record went into the steps that the result stands "
        "on. Steps that were done again after a resume count once."
    ]
    table = Table("Where the run's time went", ["part", "seconds", "share"], rows)
    listed = Table("Events", ["seconds", "event", "step"], [[one.seconds, one.event, one.step] for one in happened])
    data = {
        "goodput": share,
        "parts": [{"part": row[0], "seconds": row[1]} for row in rows],
        "attempts": [vars(one) for one in attempts],
        "events": [vars(one) for one in happened],
    }
    return Section("goodput", title, words, [events_picture(attempts, happened)], [table, listed], data)


def _attempts(events: Sequence[Happened], recorded: Sequence[float]) -> list[Attempt]:
    """Stretches that open with a start or a resume; each ends with the last thing recorded before the next."""
    begins = [one.seconds for one in events if one.event in ("started", "resumed")] or [0.0]
    found = []
    for begin, limit in zip(begins, [*begins[1:], float("inf")], strict=True):
        inside = [one for one in events if begin <= one.seconds < limit]
        times = [begin, *(one.seconds for one in inside), *(time for time in recorded if begin <= time < limit)]
        last = inside[-1].event if inside else ""
        outcome = last if last in ("done", "stopped", "not-finite") else "no end was recorded: it failed or still runs"
        found.append(Attempt(begin, max(times), outcome))
    return found


def _goodput_rows(
    records: Records, events: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt]
) -> tuple[list[Sequence[Cell]], float]:
    """Parts of the time and their shares, and the share of steps that count."""
    whole = max(attempt.end for attempt in attempts)
    between = whole - sum(attempt.end - attempt.begin for attempt in attempts)
    steps = sum(_number(record, "step_seconds") for record in records.metrics)
    saving = sum(_number(event, "seconds") for event in events if event["event"] == "saved")
    parts = {
        "steps that count": steps,
        "saving checkpoints": saving,
        "between attempts": between,
        "validation, start of the ranks, steps done again and the rest": max(0.0, whole - steps - saving - between),
    }
    whole = whole or 1.0
    rows: list[Sequence[Cell]] = [[name, seconds, f"{seconds / whole:.1%}"] for name, seconds in parts.items()]
    return rows, steps / whole


def _number(record: Mapping[str, Any], key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _expected_goodput(records: Records) -> Section:
    """What a plan expects, where it was asked about failures."""
    answer = records.expected
    if not answer:
        return Section("goodput", "Goodput", absent="a plan without --mtbf expects no failures")
    seconds = ("mtbf_s", "interval_s", "young_s", "daly_s", "exact_s", "stall_s")
    rows: list[Sequence[Cell]] = [
        [name.removesuffix("_s"), show_seconds(answer[name])] for name in seconds if answer.get(name) is not None
    ]
    rows += [["goodput, expected", f"{answer['goodput']:.2%}"]]
    rows += [[f"lost: {name}", f"{share:.2%}"] for name, share in (answer.get("shares") or {}).items()]
    table = Table("Checkpoints and failures, expected", ["", ""], rows)
    return Section("goodput", "Goodput", tables=[table], data=dict(answer), open_tables=True)


def summary_line(page: Page) -> str:
    """One line for the terminal: which sections there are."""
    there = [section.title.lower() for section in page.sections if not section.absent]
    return f"{len(there)} sections: {', '.join(there)}"
