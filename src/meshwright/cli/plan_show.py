"""The tables of ``meshwright plan``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from meshwright.job.layout_text import parse_layout
from meshwright.plan.placement import order_words

if TYPE_CHECKING:
    from meshwright.job.job import Job
    from meshwright.ledger.ledger import Ledger
    from meshwright.plan.answer import Plan, PlannedLayout, Rejected
    from meshwright.plan.side_by_side import Compared, Crossing

_FRONT_ROWS = 8
_MOST_REJECTED = 24


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
        node = int(found.cluster.split("x")[1].split()[0])
        console.print(_layouts("predicted" if found.fits else "closest", found.layouts, node))
    if found.placement:
        console.print(f"placement: {found.placement}", highlight=False, soft_wrap=True)
    if len(found.pareto) > 1:
        step = max(1, -(-len(found.pareto) // _FRONT_ROWS))
        console.print(_front(found.pareto[::step]))
    if found.rejected:
        console.print(_rejected(found.rejected))
    for assumed in found.basis:
        console.print(f"assumed: {assumed}", style="dim", highlight=False, soft_wrap=True)


def _layouts(title: str, layouts: Sequence[PlannedLayout], node: int) -> Table:
    table = Table(
        title=f"{title}, fastest first; speed-up and efficiency predicted against one device", title_justify="left"
    )
    for name in ("layout", "inside a node"):
        table.add_column(name, overflow="fold")
    for name in ("step", "tokens/s", "MFU", "peak", "fullest rank"):
        table.add_column(name, justify="right")
    table.add_column("binds", overflow="fold")
    table.add_column("useful speed-up", justify="right")
    table.add_column("efficiency", justify="right")
    for each in layouts:
        layout = parse_layout(each.layout)
        table.add_row(
            _bare(each.layout), order_words(layout, node), seconds(each.step_time_s), f"{each.tokens_per_s:,.0f}",
            f"{each.mfu:.1%}", size(each.peak_memory_bytes) + ("" if each.fits else " !"), str(each.fullest_rank),
            each.binding, _number(each.useful_speedup), _percent(each.efficiency),
        )  # fmt: skip
    return table


def _front(front: Sequence[PlannedLayout]) -> Table:
    table = Table(title="time against memory: nothing beats these in both", title_justify="left")
    table.add_column("peak", justify="right")
    table.add_column("step", justify="right")
    table.add_column("layout", overflow="fold")
    for each in front:
        table.add_row(size(each.peak_memory_bytes), seconds(each.step_time_s), _bare(each.layout))
    return table


def _rejected(lines: Sequence[Rejected]) -> Table:
    """One row a family; illegal ones that break the same rule share a row."""
    table = Table(title="rejected", title_justify="left")
    table.add_column("family", overflow="fold")
    table.add_column("layouts", justify="right")
    table.add_column("why", overflow="fold")
    table.add_column("its best, or closest", overflow="fold")
    shown = [line for line in lines if line.kind != "illegal"]
    for line in shown[:_MOST_REJECTED]:
        table.add_row(line.family, f"{line.layouts:,}", line.reason, _bare(line.closest or ""))
    if len(shown) > _MOST_REJECTED:
        table.add_row(f"and {len(shown) - _MOST_REJECTED} families more", "", "see --json", "")
    grouped: dict[str, list[str]] = {}
    for line in lines:
        if line.kind == "illegal":
            grouped.setdefault(line.reason, []).append(line.family)
    for reason, families in grouped.items():
        more = f" and {len(families) - 1} more" if len(families) > 1 else ""
        table.add_row(f"{families[0]}{more}", "0", reason, "")
    return table


def show_explained(console: Console, layout: str, ledger: Ledger, lines: Sequence[tuple[str, str, int]]) -> None:
    """Every number of one rank's ledger with the formula beside it."""
    entry = ledger.ranks[0]
    place = " ".join(f"{axis}={index}" for axis, index in entry.place.items())
    title = f"ledger of rank {entry.rank} ({place}) under {_bare(layout)}, predicted"
    table = Table(title=title, title_justify="left")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_column("formula", overflow="fold")
    for quantity, formula, value in lines:
        table.add_row(quantity, f"{value:,}", formula)
    console.print(table)


def show_compared(console: Console, found: Sequence[Compared]) -> None:
    """One column a layout."""
    table = Table(title="side by side, predicted; bytes of one rank and step", title_justify="left")
    table.add_column("")
    for each in found:
        table.add_column(_bare(each.layout), overflow="fold")
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
        console.print(f"fastest that fits: {_bare(best.layout)}, {seconds(best.step_time_s)} a step", highlight=False)
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
    return "; ".join(f"{each.axis}: {size(each.wire)} in {each.messages:,} messages, {each.link}" for each in crossings)


def _bare(text: str) -> str:
    """A layout without its placement, which is as long as there are ranks."""
    return " ".join(word for word in text.split() if not word.startswith("placement="))


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
