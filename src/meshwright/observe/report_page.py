"""Sections as one HTML file that needs nothing beside it: no script runs, no font, style or picture is fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

_MOST_ROWS = 400
"""Rows of a table; what is beyond stands in the section's data."""

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """The numbers behind a picture, for eyes and for screen readers."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Section:
    """One part of the report. ``absent`` says in one line why there is no picture."""

    name: str
    title: str
    words: Sequence[str] = ()
    pictures: Sequence[str] = ()
    tables: Sequence[Table] = ()
    data: Any = None
    absent: str = ""
    open_tables: bool = False
    """The tables are what the section shows, not what is behind its picture."""


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    facts: Sequence[tuple[str, str]]
    """What is reported on, above everything."""
    sections: Sequence[Section]
    notes: Sequence[str] = field(default=())
    """What was missing, and what was assumed."""

    def to_html(self) -> str:
        """The file's text."""
        style = files("meshwright.observe").joinpath("report.css").read_text("utf-8")
        shown = [section for section in self.sections if not section.absent]
        absent = [section for section in self.sections if section.absent]
        parts = [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # The file asks for nothing, and nothing in it may: neither a script nor an address.
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'">',
            f"<title>{escape(self.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>",
            f"<h1>{escape(self.title)}</h1>",
            _facts(self.facts),
            "<nav><ul>" + "".join(f'<li><a href="#{one.name}">{escape(one.title)}</a></li>' for one in shown)
            + "</ul></nav>",
            *(_section(section) for section in shown),
            _absent(absent),
            _notes(self.notes),
            "</main>\n</body>\n</html>\n",
        ]  # fmt: skip
        return "\n".join(part for part in parts if part)

    def to_data(self) -> dict[str, Any]:
        """The same as values: what is behind each picture, and why a section is absent."""
        sections = {
            section.name: {"title": section.title, "absent": section.absent or None, "data": section.data}
            for section in self.sections
        }
        return {"title": self.title, "facts": dict(self.facts), "sections": sections, "notes": list(self.notes)}


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts) + "</dl>"


def _section(section: Section) -> str:
    parts = [f'<section id="{section.name}" aria-labelledby="{section.name}-h">']
    parts.append(f'<h2 id="{section.name}-h">{escape(section.title)}</h2>')
    parts += [f"<p>{escape(words)}</p>" for words in section.words]
    parts += [f'<figure tabindex="0">\n{picture}\n</figure>' for picture in section.pictures]
    look = "wide" if section.open_tables else "scroll"
    tables = "\n".join(_table(table, look) for table in section.tables if table.rows)
    if section.open_tables:
        parts.append(tables)
    elif tables:
        parts.append(f"<details><summary>The numbers behind it</summary>\n{tables}\n</details>")
    if section.data is not None:
        parts.append(
            f'<script type="application/json" id="{section.name}-data">{_json(section.data)}</script>'
        )  # data, not a program: no browser runs this type
    parts.append("</section>")
    return "\n".join(parts)


def _json(data: Any) -> str:
    """JSON that cannot end its element, whatever names stand in it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")


def _table(table: Table, look: str = "scroll") -> str:
    numeric = [any(isinstance(row[index], (int, float)) for row in table.rows) for index in range(len(table.columns))]
    head = "".join(
        f'<th scope="col" class="{"number" if number else "words"}">{escape(column)}</th>'
        for column, number in zip(table.columns, numeric, strict=True)
    )
    rows = ["<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in table.rows[:_MOST_ROWS]]
    more = len(table.rows) - len(rows)
    note = f" ({more:,} more rows are in the section's JSON)" if more > 0 else ""
    return (
        f'<div class="{look}" tabindex="0"><table><caption>{escape(table.caption + note)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if cell is None:
        return "<td></td>"
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    words = f"{cell:,}" if isinstance(cell, int) else f"{cell:,.0f}" if cell.is_integer() else f"{cell:.6g}"
    return f'<td class="number">{words}</td>'


def _absent(absent: Sequence[Section]) -> str:
    if not absent:
        return ""
    lines = "".join(f"<li><b>{escape(one.title)}</b>: {escape(one.absent)}</li>" for one in absent)
    return f'<section id="absent"><h2>Not in this report</h2><ul>{lines}</ul></section>'


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return f"<footer><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul></footer>"
