"""Which faults of a run have happened: a file each in ``faults/``, so that none happens twice, across restarts too."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from meshwright.files import replace_text
from meshwright.job.fault_section import Fault, parse_fault

FOLDER = "faults"
"""In a run directory."""
_FIRED = ".fired.json"
_ASKED = ".asked.json"


def named(faults: Iterable[Fault]) -> Iterator[tuple[str, Fault]]:
    """Each fault with a name that is the same in every attempt of a run; equal ones are numbered."""
    seen: Counter[str] = Counter()
    for fault in faults:
        text = str(fault)
        yield f"{fault.kind}-{zlib.crc32(text.encode()):08x}-{seen[text]}", fault
        seen[text] += 1


class Fired:
    """The faults of one run directory that have happened, and those that somebody asked for meanwhile."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._folder = run_dir, run_dir / FOLDER

    def has(self, name: str) -> bool:
        """Whether the fault of that name has happened."""
        return (self._folder / (name + _FIRED)).exists()

    def claim(self, name: str, fault: Fault) -> bool:
        """Record that it happens now, in ``faults/`` and in ``events.jsonl``; False if it already has."""
        self._folder.mkdir(exist_ok=True)
        facts = {"time": round(time.time(), 3), "event": "fault", "fault": str(fault), "kind": fault.kind,
                 "rank": fault.rank, "step": fault.step, "phase": fault.phase, "pid": os.getpid()}  # fmt: skip
        line = json.dumps(facts).encode() + b"\n"
        try:
            file = os.open(self._folder / (name + _FIRED), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        _write(file, line)
        # One write to a file opened for appending: it never mixes with what the first rank writes there.
        _write(os.open(self._run_dir / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), line)
        return True

    def records(self) -> list[dict[str, Any]]:
        """What has happened, oldest first."""
        found = [json.loads(path.read_text(encoding="utf-8")) for path in self._folder.glob(f"*{_FIRED}")]
        return sorted(found, key=lambda record: float(record["time"]))

    def ask(self, fault: Fault) -> str:
        """Leave a fault for a run that listens; its name."""
        self._folder.mkdir(exist_ok=True)
        name = f"{fault.kind}-{time.time_ns():x}"
        replace_text(self._folder / (name + _ASKED), json.dumps({"fault": str(fault)}) + "\n")
        return name

    def asked(self) -> list[tuple[str, Fault]]:
        """What was left so, with names."""
        return [
            (path.name.removesuffix(_ASKED), parse_fault(json.loads(path.read_text(encoding="utf-8"))["fault"]))
            for path in sorted(self._folder.glob(f"*{_ASKED}"))
        ]


def _write(file: int, line: bytes) -> None:
    try:
        os.write(file, line)
    finally:
        os.close(file)
