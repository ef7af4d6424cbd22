"""Ledgers as tables for the terminal: the fullest rank first, traffic by axis, times that sum to the step.

They are made for 80 columns: a number that does not fit goes on in the next line, and none is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.ledger.compare import Difference
from meshwright.ledger.ledger import CATEGORIES, Ledger, RankLedger, Spends

MOST_RANKS = 16
"""Rows of a table; a larger world shows its fullest ranks."""


_LONGEST_WORD = len("reduce_scatter")
RANKS_ABREAST = 5
"""Columns of ranks that stand side by side."""


def ledger_tables(ledger: Ledger) -> list[Group]:
    """What the ranks store, compute, send and spend; the last only where it was timed."""
    return [stores_table(ledger), computes_table(ledger), sends_table(ledger), *spends_tables(ledger)]


def with_unit(value: float, unit: str, base: int = 1000) -> str:
    """``value`` with a prefix so that one to three digits stand before the point: ``1.5 MiB``, ``12.3 GFLOP``."""
    prefixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi") if base == 1024 else ("", "k", "M", "G", "T", "P", "E")
    size, prefix = float(value), prefixes[0]
    for prefix in prefixes:
        if abs(size) < base or prefix == prefixes[-1]:
            break
        size /= base
    digits = 0 if prefix == "" else 1
    return f"{size:,.{digits}f} {prefix}{unit}"


def _bytes(value: float) -> str:
    return with_unit(value, "B", 1024)


def _seconds(value: float) -> str:
    return f"{value * 1000:,.1f}"


def number_table(first: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table: columns of words, then columns of numbers, of which nothing is ever cut off.

    Operations and quantities have room for their longest word.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in first:
        table.add_column(name, overflow="fold", min_width=_LONGEST_WORD if name in ("operation", "quantity") else None)
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def titled(title: str, table: Table) -> Group:
    """The table under its title, which may be wider than it, and an empty line."""
    return Group(Text(title, style="table.title"), table, "")


def _fullest_first(ledger: Ledger) -> list[RankLedger]:
    return sorted(ledger.ranks, key=lambda entry: (-entry.stores.peak, entry.rank))[:MOST_RANKS]


def _title(ledger: Ledger, what: str) -> str:
    shown = min(len(ledger.ranks), MOST_RANKS)
    of_all = "" if shown == ledger.world else f", {shown} of {ledger.world} ranks"
    return f"{what} ({ledger.source}; {ledger.layout}{of_all})"


def stores_table(ledger: Ledger) -> Group:
    """Bytes by category and rank; the fullest rank first."""
    numbers = [*CATEGORIES, "peak"]
    if with_allocator := any(entry.stores.allocator_peak is not None for entry in ledger.ranks):
        numbers.append("allocator peak")
    table = number_table(["rank"], numbers)
    for entry in _fullest_first(ledger):
        row = [_bytes(getattr(entry.stores, name)) for name in (*CATEGORIES, "peak")]
        if with_allocator:
            row.append(_bytes(entry.stores.allocator_peak or 0))
        table.add_row(str(entry.rank), *row)
    return titled(_title(ledger, "Stores, bytes at each one's highest"), table)


def computes_table(ledger: Ledger) -> Group:
    """FLOPs by kind and rank."""
    numbers = ["forward", "backward", "computed again", "model FLOPs", "hardware FLOPs"]
    table = number_table(["rank"], numbers)
    for entry in _fullest_first(ledger):
        did = entry.computes
        row = (did.forward, did.backward, did.recompute, did.model, did.hardware)
        table.add_row(str(entry.rank), *(with_unit(value, "FLOP") for value in row))
    return titled(_title(ledger, "Computes, FLOPs a step"), table)


def sends_table(ledger: Ledger) -> Group:
    """Traffic by axis, operation and phase: what the rank that sends most of it sends, and all ranks together."""
    table = number_table(
        ["axis", "operation", "phase"],
        ["messages", "payload, most on a rank", "wire, most on a rank", "wire, all ranks"],
    )
    keys = sorted({send.key for entry in ledger.ranks for send in entry.sends})
    last_axis = None
    for key in keys:
        sends = [send for entry in ledger.ranks for send in entry.sends if send.key == key]
        if last_axis not in (None, key[0]):
            table.add_section()
        last_axis = key[0]
        messages = max(send.messages for send in sends)
        payload, wire = max(send.payload for send in sends), max(send.wire for send in sends)
        table.add_row(*key, str(messages), _bytes(payload), _bytes(wire), _bytes(sum(send.wire for send in sends)))
    if not keys:
        table.add_row("none", "", "", "0", "0 B", "0 B", "0 B")
    return titled(_title(ledger, "Sends, a step"), table)


def spends_tables(ledger: Ledger) -> list[Group]:
    """Milliseconds by part (rows) and rank (columns), some ranks a table; the parts sum to the wall time."""
    timed = [(entry.rank, entry.spends) for entry in _fullest_first(ledger) if entry.spends is not None]
    abreast = [dict(timed[start : start + RANKS_ABREAST]) for start in range(0, len(timed), RANKS_ABREAST)]
    title = _title(ledger, "Spends, milliseconds of a step")
    return [
        titled(title, spends_table({f"rank {rank}": spends for rank, spends in ranks.items()})) for ranks in abreast
    ]


def spends_table(columns: Mapping[str, Spends]) -> Table:
    """Milliseconds by part (rows) and whose they are (columns); parts of less than a tenth nowhere are left out."""
    table = number_table([""], [*columns])
    parts = [dict(spends.parts()) for spends in columns.values()]
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part.get(name, 0.0) for part in parts]
        if any(value > 5e-5 for value in values):
            table.add_row(name, *(_seconds(value) for value in values))
    table.add_section()
    table.add_row("sum", *(_seconds(spends.sum) for spends in columns.values()))
    table.add_row("wall", *(_seconds(spends.wall) for spends in columns.values()))
    return table


def comparison_table(differences: Sequence[Difference], *, all_rows: bool = False) -> Group:
    """Quantities side by side, by source; only those that differ unless ``all_rows``. What repeats stands once."""
    sources = list(dict.fromkeys(source for difference in differences for source in difference.values))
    table = number_table(["rank", "quantity"], [*sources, "difference", "allowed"])
    before: tuple[str, str] | None = None
    for one in differences:
        if not all_rows and one.relative == 0.0:
            continue
        kind, _, name = one.quantity.rpartition(": ")
        again = before == (str(one.rank), kind)
        before = (str(one.rank), kind)
        values = [_exactly(one.values[source]) if source in one.values else "" for source in sources]
        allowed = "" if one.allowed is None else f"{one.allowed:.2%} {'ok' if one.agrees else 'DIFFERS'}"
        words = ("", f"  {name}") if again else (str(one.rank), one.quantity)
        table.add_row(*words, *values, f"{one.relative:.3%}", allowed)
    return titled("Ledgers side by side", table)


def _exactly(value: float) -> str:
    """Whole numbers to the last digit."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"
