"""One command of a fault campaign, from its start to the end of its last process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

from bench.fault_draw import Group

ROOT = Path(__file__).parents[1]
MARK = "MESHWRIGHT_BENCH_FAULTS"
"""Environment variable by which every process of a run is found again, whatever its session or group."""
BOUND = 240.0
"""Seconds in which a command must have ended: a hang lasts longer. Generous, for busy machines."""
ORPHAN_SECONDS = 10.0
"""After the end of the command, in which its last process must be gone."""


class Attempt:
    """``meshwright train`` with the faults of a group."""

    def __init__(self, job: Path, out: Path, group: Group, layout: str, number: int, *, resume: bool) -> None:
        self._token = f"{os.getpid()}-{group.number}-{number}"
        texts = json.dumps([str(fault) for fault in group.faults])
        words = ["train", str(job), "--out", str(out), "--layout", f"{layout} micro_batch=1", "--json",
                 "--set", f"fault.inject={texts}", *(["--resume"] if resume else [])]  # fmt: skip
        words += [word for setting in group.settings for word in ("--set", setting)]
        self.began = time.time()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.cli.main", *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self._token},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.code, self.ended, self.errors = 0, self.began, ""
        self.hang, self.orphans = False, 0

    @property
    def said(self) -> str:
        """The last line on standard error."""
        return next(reversed(self.errors.strip().splitlines()), f"exit code {self.code}")

    def follow(self) -> None:
        """Wait for the end; what hangs is killed, what stays behind is counted and killed."""
        try:
            _, self.errors = self._process.communicate(timeout=BOUND)
        except subprocess.TimeoutExpired:
            self.hang = True
            for process in self._alive():
                _kill(process)
            _, self.errors = self._process.communicate()
        self.code, self.ended = self._process.returncode, time.time()
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.orphans = len(alive)
        for process in alive:
            _kill(process)

    def _alive(self) -> list[psutil.Process]:
        """Every process that carries this attempt's mark and has not ended."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._token and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def named(self) -> str:
        """The rank that the report of a failure says is the cause, or an empty text."""
        # A save fails on all ranks alike, with the one that could not write in brackets.
        match = re.search(r"could not be saved to \S+ \(rank (\d+):", self.errors)
        match = match or re.search(r"\brank (\d+) of \d+ ", self.errors)
        return match[1] if match else ""


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return
