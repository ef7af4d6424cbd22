"""Ledgers as tables for the terminal: the fullest rank first, traffic by axis, times that sum to the step."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from meshwright.ledger.compare import Difference
from meshwright.ledger.ledger import CATEGORIES, Ledger, RankLedger

MOST_RANKS = 16
"""Rows of a table; a larger world shows its fullest ranks."""


def ledger_tables(ledger: Ledger) -> list[Table]:
    """What the ranks store, compute, send and spend; the last only where it was timed."""
    tables = [stores_table(ledger), computes_table(ledger), sends_table(ledger)]
    if any(entry.spends is not None for entry in ledger.ranks):
        tables.append(spends_table(ledger))
    return tables


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


def _table(title: str, first: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in first:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _fullest_first(ledger: Ledger) -> list[RankLedger]:
    return sorted(ledger.ranks, key=lambda entry: (-entry.stores.peak, entry.rank))[:MOST_RANKS]


def _title(ledger: Ledger, what: str) -> str:
    shown = min(len(ledger.ranks), MOST_RANKS)
    of_all = "" if shown == ledger.world else f", {shown} of {ledger.world} ranks"
    return f"{what} ({ledger.source}; {ledger.layout}{of_all})"


def stores_table(ledger: Ledger) -> Table:
    """Bytes by category and rank; the fullest rank first."""
    numbers = [*CATEGORIES, "peak"]
    if with_allocator := any(entry.stores.allocator_peak is not None for entry in ledger.ranks):
        numbers.append("allocator peak")
    table = _table(_title(ledger, "Stores, bytes at each one's highest"), ["rank"], numbers)
    for entry in _fullest_first(ledger):
        row = [_bytes(getattr(entry.stores, name)) for name in (*CATEGORIES, "peak")]
        if with_allocator:
            row.append(_bytes(entry.stores.allocator_peak or 0))
        table.add_row(str(entry.rank), *row)
    return table


def computes_table(ledger: Ledger) -> Table:
    """FLOPs by kind and rank."""
    numbers = ["forward", "backward", "computed again", "model FLOPs", "hardware FLOPs"]
    table = _table(_title(ledger, "Computes, FLOPs a step"), ["rank"], numbers)
    for entry in _fullest_first(ledger):
        did = entry.computes
        row = (did.forward, did.backward, did.recompute, did.model, did.hardware)
        table.add_row(str(entry.rank), *(with_unit(value, "FLOP") for value in row))
    return table


def sends_table(ledger: Ledger) -> Table:
    """Traffic by axis, operation and phase: what the rank that sends most of it sends, and all ranks together."""
    table = _table(
        _title(ledger, "Sends, a step"),
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
    return table


def spends_table(ledger: Ledger) -> Table:
    """Milliseconds by part (rows) and rank (columns); the parts sum to the wall time."""
    entries = [entry for entry in _fullest_first(ledger) if entry.spends is not None]
    table = _table(
        _title(ledger, "Spends, milliseconds of a step"), [""], [f"rank {entry.rank}" for entry in entries]
    )
    parts = [dict(entry.spends.parts()) for entry in entries if entry.spends is not None]
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part.get(name, 0.0) for part in parts]
        if any(value > 5e-5 for value in values):
            table.add_row(name, *(_seconds(value) for value in values))
    table.add_section()
    spends = [entry.spends for entry in entries if entry.spends is not None]
    table.add_row("sum", *(_seconds(one.sum) for one in spends))
    table.add_row("wall", *(_seconds(one.wall) for one in spends))
    return table


def comparison_table(differences: Sequence[Difference], *, all_rows: bool = False) -> Table:
    """Quantities side by side, by source; only those that differ unless ``all_rows``."""
    sources = list(dict.fromkeys(source for difference in differences for source in difference.values))
    table = _table("Ledgers side by side", ["rank", "quantity"], [*sources, "difference", "allowed", ""])
    for one in differences:
        if not all_rows and one.relative == 0.0:
            continue
        values = [f"{one.values[source]:,.6g}" if source in one.values else "" for source in sources]
        allowed = "" if one.allowed is None else f"{one.allowed:.2%}"
        verdict = "" if one.allowed is None else ("ok" if one.agrees else "DIFFERS")
        table.add_row(str(one.rank), one.quantity, *values, f"{one.relative:.3%}", allowed, verdict)
    return table
