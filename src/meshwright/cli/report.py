"""``meshwright report``: one HTML file about a run or a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.outputs import check_out
from meshwright.errors import InputError
from meshwright.files import replace_text
from meshwright.observe.report import Records, read_records


def report(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_PLAN", help="A run directory, or what `meshwright plan --json` printed.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; absent: report.html in the run, or PLAN.html beside the plan.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers behind the pictures too.")] = False,
) -> None:
    """Write one self-contained HTML file about a run or a plan.

    Memory against capacity, the time of a step, the pipeline, traffic between ranks, the search, predicted against
    measured, losses, speed, goodput. It opens from disk without a network. What a record lacks is named and left out.
    """
    from meshwright.cli.report_facts import predict_for
    from meshwright.observe.report_run import build_page, summary_line

    records = read_records(source)
    target = _target(records, out)
    page = build_page(records, predict_for(records))
    replace_text(target, page.to_html())
    if as_json:
        answer: dict[str, Any] = {"out": str(target), **page.to_data()}
        print(json.dumps(answer))
        return
    print(f"{target}: {summary_line(page)}")
    for section in page.sections:
        if section.absent:
            print(f"left out: {section.title.lower()}: {section.absent}")


def _target(records: Records, out: Path | None) -> Path:
    """Where the report goes; refused before anything is computed when that cannot be."""
    if out is None:
        out = records.source / "report.html" if records.is_run else records.source.with_suffix(".html")
    if out.resolve() == records.source.resolve():
        raise InputError(f"--out: {out} is the plan itself; give another file, for example {out.stem}-report.html")
    return check_out(out, ".html", "a report")
