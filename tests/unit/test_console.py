"""Tables in a file or a pipe."""

from __future__ import annotations

import pytest
from rich.table import Table

from meshwright.observe.console import table_console


def test_a_table_in_a_pipe_is_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(*(f"column {number}" for number in range(12)))
    table.add_row(*("12,345,678 B" for _ in range(12)))
    table_console().print(table)
    out = capsys.readouterr().out
    assert "…" not in out and out.count("12,345,678 B") == 12
    monkeypatch.setenv("COLUMNS", "60")
    table_console().print(table)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
