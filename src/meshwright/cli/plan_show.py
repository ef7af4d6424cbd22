"""The tables of ``meshwright plan``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from meshwright.job.layout_text import parse_layout
from meshwright.plan.placement import order_words

if TYPE_CHECKING:
    from meshwright.job.job import Job
    from meshwright.ledger.ledger import Ledger, RankLedger
    from meshwright.plan.answer import Plan, PlannedLayout, Rejected
    from meshwright.plan.side_by_side import Compared, Crossing

_FRONT_ROWS = 8
_MOST_REJECTED = 24
_DELAYED = (
    "schedule=2bw does not train what the other schedules train: each gradient is taken at the parameters of one "
    "update before. Parameters and gradients are there twice, and no rank waits at the end of a step"
)


def show_plan(console: Console, found: Plan, job: Job) -> None:
    """The whole answer."""
    left_out = f", {found.illegal:,} more broke a rule" if found.illegal else ""
    console.print(
        f"{found.model} ({job.model_spec.parameter_count:,} parameters) on {found.cluster}: {found.searched:,} "
        f"layout{'s' if found.searched != 1 else ''} in {found.seconds:.1f} s{left_out}",
        highlight=False,
        soft_wrap=True,
    )
    if found.layouts:
        node = int(found.cluster.split()[0].split("x")[1])
        title = "fastest first" if found.fits else "closest to fitting"
        console.print(_layouts(title, found.layouts, node), soft_wrap=True)
    if any(parse_layout(each.layout).delayed for each in found.layouts):
        console.print(_DELAYED, highlight=False, soft_wrap=True)
    if found.sync:
        console.print(f"synchronisation: {found.sync}", highlight=False, soft_wrap=True)
    if found.placement:
        console.print(f"placement: {found.placement}", highlight=False, soft_wrap=True)
    if len(found.pareto) > 1:
        step = max(1, -(-len(found.pareto) // _FRONT_ROWS))
        console.print(_front(found.pareto[::step]), soft_wrap=True)
    if found.rejected:
        console.print(_rejected(found.rejected), soft_wrap=True)
    for assumed in found.basis:
        console.print(f"assumed: {assumed}", style="dim", highlight=False, soft_wrap=True)


def _layouts(title: str, layouts: Sequence[PlannedLayout], node: int) -> Group:
    """Two lines each: the figures, and the layout under them, which may be long."""
    names = f"{'':>3} {'step':>8} {'tokens/s':>10} {'MFU':>6} {'peak':>9}"
    head = f"{names} {'rank':>6} {'speed-up':>9} {'efficiency':>10}  binds"
    lines = [
        Text(f"{title}; speed-up (useful) and efficiency predicted against one device", style="italic"),
        Text(head),
    ]
    for number, each in enumerate(layouts, start=1):
        figures = (
            f"{number:>3} {seconds(each.step_time_s):>8} {each.tokens_per_s:>10,.0f} {each.mfu:>6.1%} "
            f"{size(each.peak_memory_bytes):>9} {each.fullest_rank:>6} {_number(each.useful_speedup):>9} "
            f"{_percent(each.efficiency):>10}  {each.binding}"
        )
        words = f"    {short(each.layout)}  (inside a node: {order_words(parse_layout(each.layout), node)})"
        lines += [Text(figures, style="bold"), Text(words)]
    return Group(*lines)


def _front(front: Sequence[PlannedLayout]) -> Group:
    lines = [Text("time against memory: nothing beats these in both", style="italic")]
    for each in front:
        lines.append(Text(f"{size(each.peak_memory_bytes):>12} {seconds(each.step_time_s):>8}  {short(each.layout)}"))
    return Group(*lines)


def _rejected(lines: Sequence[Rejected]) -> Group:
    """One line a family; illegal ones that break the same rule share a line."""
    shown = [line for line in lines if line.kind != "illegal"]
    texts = [Text("rejected families, with the layouts tried of each", style="italic")]
    for line in shown[:_MOST_REJECTED]:
        best = "best" if line.kind == "slower" else "closest"
        texts.append(
            Text(f"  {line.family:<20} {line.layouts:>9,}  {line.reason} ({best}: {short(line.closest or '')})")
        )
    if len(shown) > _MOST_REJECTED:
        texts.append(Text(f"  and {len(shown) - _MOST_REJECTED} families more, in --json"))
    grouped: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line.kind == "illegal":
            value, _, rule = line.reason.removeprefix("rule: ").partition(" ")
            key, _, number = value.partition("=")
            grouped.setdefault((key, rule), []).append(number)
    for (key, rule), numbers in grouped.items():
        several = sorted(set(numbers), key=lambda number: int(number) if number.isdigit() else 0)
        families = "family" if len(numbers) == 1 else "families"
        texts.append(Text(f"  {key}={' or '.join(several)} ({len(numbers)} {families}): {key} {rule}"))
    return Group(*texts)


def show_explained(console: Console, layout: str, ledger: Ledger, lines: Sequence[tuple[str, str, int]]) -> None:
    """Every number of one rank's ledger with the formula beside it."""
    entry = ledger.ranks[0]
    place = " ".join(f"{axis}={index}" for axis, index in entry.place.items())
    title = f"ledger of rank {entry.rank} ({place}) under {short(layout)}, predicted"
    table = Table(title=title, title_justify="left")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_column("formula", overflow="fold")
    for quantity, formula, value in [*_totals(entry), *lines]:
        table.add_row(quantity, f"{value:,}", formula)
    console.print(table)


def _totals(entry: RankLedger) -> list[tuple[str, str, int]]:
    """What is walked through, not summed: memory that comes and goes, and FLOPs."""
    stores, computes = entry.stores, entry.computes
    at_peak = " + ".join(f"{name} {value:,}" for name, value in stores.at_peak.items())
    return [
        ("stores: peak", at_peak, stores.peak),
        ("stores: activations, at most", "kept by forward for backward, micro-batches in flight", stores.activations),
        ("stores: temporary, at most", "everything else that comes and goes", stores.temporary),
        ("computes: forward", "products 2 m n k, causal attention 2 b h d s^2", computes.forward),
        ("computes: backward", "2 x forward", computes.backward),
        ("computes: recompute", "forward work done again, half a forward of attention a backward", computes.recompute),
    ]


def show_compared(console: Console, found: Sequence[Compared]) -> None:
    """One column a layout."""
    table = Table(title="side by side, predicted; bytes of one rank and step", title_justify="left")
    table.add_column("")
    for each in found:
        table.add_column(short(each.layout), overflow="fold")
    table.add_row("does the full state fit?", *(_fits(each) for each in found))
    table.add_row("and the peak?", *(_peak(each) for each in found))
    table.add_row("how many batches advance at once?", *(_batches(each) for each in found))
    table.add_row("gradients cross", *(_crossings(each.gradients) for each in found))
    table.add_row("activations cross", *(_crossings(each.activations) for each in found))
    if any(each.parameters for each in found):
        table.add_row("parameters cross", *(_crossings(each.parameters) for each in found))
    table.add_row(
        "step time", *(f"{seconds(each.step_time_s)}{'' if each.fits else ' if it fitted'}" for each in found)
    )
    table.add_row("tokens/s, MFU", *(f"{each.tokens_per_s:,.0f}, {each.mfu:.1%}" for each in found))
    table.add_row("binds", *(each.binding for each in found))
    console.print(table)
    fitting = [each for each in found if each.fits]
    if fitting and len(found) > 1:
        best = min(fitting, key=lambda each: each.step_time_s)
        console.print(f"fastest that fits: {short(best.layout)}, {seconds(best.step_time_s)} a step", highlight=False)
    elif not fitting:
        console.print("none of them fits", highlight=False)


def _fits(each: Compared) -> str:
    word = "yes" if each.state_fits else "no"
    return f"{word}: {size(each.state_bytes)} of {size(each.memory_bytes)}"


def _peak(each: Compared) -> str:
    word = "yes" if each.fits else "no"
    return f"{word}: {size(each.peak_memory_bytes)} on rank {each.fullest_rank}"


def _batches(each: Compared) -> str:
    who = "rank" if each.ranks_of_group == 1 else f"group of {each.ranks_of_group}"
    return (
        f"{each.groups}, one on each {who}: {each.micro_batch} "
        f"sequence{'s' if each.micro_batch > 1 else ''} each, {each.micro_batches} in turn"
    )


def _crossings(crossings: Sequence[Crossing]) -> str:
    if not crossings:
        return "nothing"
    return "; ".join(
        f"{each.axis}: {size(each.wire)} in {each.messages:,} message{'s' if each.messages > 1 else ''}, {each.link}"
        for each in crossings
    )


def short(text: str) -> str:
    """A layout without its placement, which is as long as there are ranks, and with long lists of stages cut."""
    words = []
    for word in text.split():
        key, _, value = word.partition("=")
        entries = value.split(",")
        if key == "stages" and len(entries) > 8:
            word = f"stages={','.join(entries[:3])},...,{entries[-1]}"
        if key != "placement":
            words.append(word)
    return " ".join(words)


def seconds(value: float) -> str:
    """As a person reads it."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def size(value: float) -> str:
    """Bytes in GB (10^9), or MB below one."""
    if value >= 1e9:
        return f"{value / 1e9:.1f} GB" if value < 1e12 else f"{value / 1e12:.2f} TB"
    return f"{value / 1e6:.3g} MB"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
