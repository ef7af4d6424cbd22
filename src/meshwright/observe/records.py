"""Append-only JSONL files: one object a line, whole lines only."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from meshwright.files import replace_text


class JsonLines:
    """A JSONL file that a reader may follow while it grows.

    Each record is one ``write`` call, so a killed process leaves at most one cut line, at the end;
    opening again drops such a line.
    """

    def __init__(self, path: Path) -> None:
        _drop_cut_line(path)
        self.path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, **record: Any) -> None:
        """Append one record; ``time`` (seconds since the epoch) is added. What is not finite becomes null."""
        # JSON has no NaN and no infinity; most readers stop at one.
        values = {name: None if _not_finite(value) else value for name, value in record.items()}
        self._file.write(json.dumps({"time": round(time.time(), 3), **values}, allow_nan=False) + "\n")

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole records of a JSONL file; an absent file has none.

    Raises:
        ValueError: a line is no JSON object; says which, and of which file.
    """
    if not path.exists():
        return []
    with open(path, encoding="utf-8") as lines:
        return [_record(path, number, line) for number, line in enumerate(lines, 1) if line.endswith("\n")]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path} line {number} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} line {number} is no JSON object")
    return value


def truncate_after_step(path: Path, step: int) -> None:
    """Keep the records up to ``step``: a resumed run replays the later ones, and each step stands once."""
    kept = [record for record in read_json_lines(path) if record.get("step", 0) <= step]
    if path.exists():
        replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def _drop_cut_line(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
