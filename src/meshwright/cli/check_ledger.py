"""``meshwright check --ledger``: predicted, traced and measured ledgers side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from meshwright.cli.check import dtype_settings
from meshwright.errors import InputError
from meshwright.job.cluster import load_cluster
from meshwright.job.job import load_job
from meshwright.job.layout import Layout
from meshwright.ledger.render import comparison_table, spends_table, titled
from meshwright.observe.console import table_console
from meshwright.prove.ledgers import NO_CLUSTER, Agreement, check_ledgers, hold_together
from meshwright.prove.pool import RankPool


def compare_ledgers(
    job_file: Path,
    layout: str | None,
    matrix: str | None,
    dtype: str | None,
    max_ranks: int,
    cluster: str | None,
    overrides: list[str],
    as_json: bool,
) -> NoReturn:
    """Run the comparison that the options of ``check`` ask for, print it, and exit: 0 all agree, 1 not."""
    settings = [*overrides, *dtype_settings(dtype)]
    job = load_job(job_file, settings, layout)
    if job.sync.strategy == "server":
        raise InputError(
            "check: --ledger compares ranks, and sync.strategy=server has none; a run holds its servers' bytes against "
            "the closed form itself, in summary.json under servers"
        )
    machine = None if cluster is None else load_cluster(cluster)
    console = table_console(stderr=as_json)  # standard output is for the JSON object alone
    began = time.monotonic()

    def show(result: Agreement) -> None:
        console.print(_line(result, time.monotonic() - began), highlight=False, soft_wrap=True)

    results: list[Agreement] = []
    with _pools() as pools:
        if layout is not None:
            resolved = job.resolve()
            refuse_too_many(resolved.layout, max_ranks)
            ranks = range(resolved.layout.ranks)
            result = hold_together(
                pools.setdefault(len(ranks), RankPool(len(ranks))), resolved, str(resolved.layout), ranks, machine
            )
            show(result)
            if not as_json:
                _show_tables(console, result)
            results.append(result)
        if matrix is not None:
            results += check_ledgers(
                job,
                lambda size: pools.setdefault(size, RankPool(size)),
                dtype=job.precision.dtype,
                max_ranks=max_ranks,
                cluster=machine,
                report=show,
            )
    passed = bool(results) and all(result.passed for result in results)
    if as_json:
        print(json.dumps({"passed": passed, "results": [result.as_json() for result in results]}))
    else:
        failed = sum(not result.passed for result in results)
        console.print(f"{len(results) - failed} of {len(results)} agree", style="bold green" if passed else "bold red")
    raise typer.Exit(0 if passed else 1)


def refuse_too_many(layout: Layout, max_ranks: int) -> None:
    """Refuse to start more ranks on this machine than ``--max-ranks`` says.

    Raises:
        InputError: the layout has more.
    """
    if layout.ranks > max_ranks:
        raise InputError(
            f"--layout: {layout} takes {layout.ranks} ranks, all on this machine; use at most {max_ranks}, or give "
            f"--max-ranks {layout.ranks}"
        )


@contextmanager
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    try:
        yield pools
    finally:
        for pool in pools.values():
            pool.close()


def _line(result: Agreement, seconds: float) -> str:
    mark = "[green]ok[/]  " if result.passed else "[red]FAIL[/]"
    unequal = [one for one in result.differences if one.relative > 0.0 and one.allowed is not None]
    wrong = [one for one in result.differences if not one.agrees]
    text = f"{seconds:6.1f} s  {mark} {result.label}  {result.dtype}  {len(result.differences)} quantities"
    if unequal:
        text += f", {len(unequal)} not equal, most by {max(one.relative for one in unequal):.2%}"
    if wrong:
        first = wrong[0]
        values = ", ".join(f"{source} {value:,.6g}" for source, value in first.values.items())
        text += f"; {len(wrong)} more than allowed, the first: rank {first.rank}, {first.quantity} ({values})"
    if not result.sums:
        text += "; the parts of a step do not sum to its wall time"
    return text


def _show_tables(console: Console, result: Agreement) -> None:
    fullest = result.measured.fullest.rank
    console.print(comparison_table([one for one in result.differences if one.rank == fullest], all_rows=True))
    others = [one for one in result.differences if one.rank != fullest and one.relative > 0.0]
    if others:
        console.print(comparison_table(others))
    slowest = result.slowest
    if slowest is None or slowest.spends is None:
        return
    measured = {"measured": slowest.spends}
    columns = measured if result.predicted_spends is None else {"predicted": result.predicted_spends, **measured}
    console.print(titled(f"Spends, milliseconds of a step (rank {slowest.rank})", spends_table(columns)))
    if result.predicted_spends is None:
        console.print(f"times are not predicted: {NO_CLUSTER}", highlight=False)
