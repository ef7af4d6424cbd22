"""The JSONL files of a run: whole lines, legal JSON, each step once."""

from __future__ import annotations

import json
import math
from pathlib import Path

from meshwright.observe.records import JsonLines, read_json_lines, truncate_after_step


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write(step=1, loss=math.nan, gradient_norm=math.inf, applied=False)
    lines.close()
    record = json.loads(path.read_text(), parse_constant=refuse_constant)
    assert (record["loss"], record["gradient_norm"], record["applied"], record["step"]) == (None, None, False, 1)


def test_a_cut_line_is_dropped_and_later_steps_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in (1, 2, 3):
        lines.write(step=step)
    lines.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    truncate_after_step(path, 2)
    again = JsonLines(path)
    again.write(step=3, loss=1.0)
    again.close()
    assert [record["step"] for record in read_json_lines(path)] == [1, 2, 3]
    assert read_json_lines(path)[-1]["loss"] == 1.0
