"""What a supervised run tells: events, alerts, one line on the terminal, and its goodput at the end."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from meshwright.comm.position import Position
from meshwright.job.job import Job
from meshwright.job.recovery_section import RecoverySection
from meshwright.recovery.alerts import Alerts
from meshwright.recovery.budget import Budget
from meshwright.recovery.endings import last_lines
from meshwright.recovery.goodput import Goodput
from meshwright.recovery.incident import Incident, where
from meshwright.recovery.shrink import set_back
from meshwright.recovery.stragglers import Straggler


class Reporting:
    """Speaks for the launcher.

    Args:
        run_directory: takes ``events.jsonl``, ``alerts.jsonl`` and ``goodput.json``.
        section: says which alerts go where.
    """

    def __init__(self, run_directory: Path, section: RecoverySection) -> None:
        self._folder = run_directory
        self._alerts = Alerts(run_directory / "alerts.jsonl", section)
        self._incidents = 0

    def event(self, event: str, **facts: Any) -> None:
        """One line of ``events.jsonl``; the ranks write there, too, each line in one piece."""
        with contextlib.suppress(OSError), (self._folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n")

    def incident(self, incident: Incident, folder: Path, again: bool, section: RecoverySection) -> None:
        """A rank has failed."""
        self._incidents += 1
        values = incident.to_values()
        del values["positions"]
        action = "restart from the last good state" if again else "stop"
        self.event("incident", folder=folder.name, action=action, **values)
        print(f"{incident.sentence}; {action}; evidence in {folder}", file=sys.stderr, flush=True)
        self._alerts.send(
            incident.kind, incident.sentence, action=action, evidence=str(folder),
            deadline_seconds=2 * section.handover + section.setup_after if again else None,
        )  # fmt: skip

    def restarting(self, step: int, source: str, lost_steps: int, budget: Budget) -> None:
        """The ranks start again."""
        self.event(
            "restarting", step=step, source=source, lost_steps=max(0, lost_steps), restarts_without_a_step=budget.used
        )

    def layout_changed(self, planned: Job, job: Job, ranks: int) -> None:
        """The ranks go on under another layout; with what of the ``planned`` job's [sync] set back, and why."""
        keys, why = set_back(planned, job)
        said = {"set_back": keys, "because": why} if keys else {}
        self.event("layout-changed", layout=str(job.layout), ranks=ranks, **said)
        if keys:
            were = ", ".join(f"{key} (was {value})" for key, value in keys.items())
            line = f"going on under layout {job.layout} ({ranks} of {planned.layout.ranks} ranks), without {were}"
            print(f"{line}: {'; '.join(why)}", file=sys.stderr, flush=True)

    def recovered(self, step: int, since_failure: float, since_known: float, ranks: int, best: int) -> None:
        """The first step after a failure is done; ``best`` is the furthest that was done before it."""
        lost = {} if (start := self._resumed_step()) is None else {"lost_steps": max(0, best - start)}
        self.event("recovered", step=step, seconds=since_failure, restart_seconds=since_known, ranks=ranks, **lost)
        self._alerts.settle_all(f"step {step} done {since_failure:.1f} s after the failure", good=True)

    def _resumed_step(self) -> int | None:
        """Where the ranks went on from, as they say themselves: they may have passed over a damaged checkpoint."""
        for line in reversed(last_lines(self._folder / "events.jsonl", 100)):
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if said["event"] == "resumed":
                    return int(said["step"])
        return None

    def slow(self, slow: Straggler, position: Position, threshold: float) -> None:
        """A rank has become slow; the run goes on."""
        what = (
            f"rank {slow.rank} is slow: {slow.own_seconds:.3f} s of own work a step where rank {slow.best_rank} needs "
            f"{slow.best_seconds:.3f} s (score {slow.score:.2f}, reported below {threshold:g}), {where(position)}"
        )
        self.event("straggler", rank=slow.rank, score=slow.score, own_seconds=slow.own_seconds,
                   best_rank=slow.best_rank, best_seconds=slow.best_seconds)  # fmt: skip
        self._alerts.send("slow", what, action="go on", rank=slow.rank, score=slow.score)

    def end(self, outcome: str, goodput: Goodput) -> None:
        """The run is over."""
        self._alerts.settle_all(outcome, good=outcome == "done")
        self._alerts.close()
        try:
            with contextlib.suppress(OSError):
                goodput.write(self._folder / "goodput.json", outcome=outcome, incidents=self._incidents)
        except (ValueError, KeyError, TypeError) as error:  # what an earlier launch left there is damaged, and stays
            self.event("goodput-not-written", reason=f"goodput.json is damaged: {type(error).__name__}: {error}")
