"""Telling people: every alert goes to ``alerts.jsonl``, a command and a webhook, with what is done about it.

An alert has an action, a deadline for it, and later an outcome. Hooks run beside the run: one that fails or takes too
long is noted in ``alerts.jsonl`` and changes nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.job.recovery_section import RecoverySection


class Alerts:
    """Sends alerts of one run.

    Args:
        path: of ``alerts.jsonl``.
        section: says which hooks there are.
    """

    def __init__(self, path: Path, section: RecoverySection) -> None:
        self._path, self._section = path, section
        self._number = 0
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._open: dict[int, dict[str, Any]] = {}

    def send(self, kind: str, what: str, *, action: str, deadline_seconds: float | None = None, **facts: Any) -> int:
        """Something happened, and this is what is done about it; the alert's number.

        Args:
            kind: such as ``dead`` or ``straggler``.
            what: one sentence.
            action: what is done.
            deadline_seconds: when it is to be done, from now; None: nothing is waited for.
            facts: what else is known.
        """
        self._number += 1
        alert = {
            "alert": self._number, "kind": kind, "what": what, "action": action, "sent": round(time.time(), 3),
            "deadline": None if deadline_seconds is None else round(time.time() + deadline_seconds, 3),
            "outcome": "open" if deadline_seconds is not None else "none needed", **facts,
        }  # fmt: skip
        if deadline_seconds is not None:
            self._open[self._number] = alert
        self._tell(alert)
        return self._number

    def settle(self, number: int, outcome: str, *, good: bool) -> None:
        """How the action of an alert came out."""
        alert = self._open.pop(number, None)
        if alert is None:
            return
        settled = round(time.time(), 3)
        in_time = settled <= alert["deadline"]
        self._tell({**alert, "outcome": outcome, "good": good, "settled": settled, "in_time": in_time})

    def settle_all(self, outcome: str, *, good: bool) -> None:
        """The same outcome for all that are open."""
        for number in list(self._open):
            self.settle(number, outcome, good=good)

    def close(self) -> None:
        """Wait for the hooks, no longer than they may take."""
        deadline = time.monotonic() + self._section.alert_timeout + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _tell(self, alert: dict[str, Any]) -> None:
        self._note(alert)
        section = self._section
        if section.alert_command is not None:
            self._beside("command", alert, lambda: _run(section.alert_command or "", alert, section.alert_timeout))
        if section.alert_webhook is not None:
            self._beside("webhook", alert, lambda: _post(section.alert_webhook or "", alert, section.alert_timeout))

    def _beside(self, hook: str, alert: dict[str, Any], call: Callable[[], None]) -> None:
        def work() -> None:
            try:
                call()
            except (OSError, subprocess.SubprocessError, urllib.error.URLError, ValueError) as error:
                self._note({"alert": alert["alert"], "hook": hook, "failed": str(error)})

        thread = threading.Thread(target=work, name=f"alert-{hook}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _note(self, record: dict[str, Any]) -> None:
        try:
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": round(time.time(), 3), **record}) + "\n")
        except OSError:
            return  # a full disk is one of the things there are alerts about


def _run(command: str, alert: dict[str, Any], timeout: float) -> None:
    """In a session of its own, which ends as a whole: a shell that is killed leaves behind what it started."""
    with subprocess.Popen(
        command, shell=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            _, said = process.communicate(json.dumps(alert).encode(), timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise ValueError(f"exit code {process.returncode}: {said.decode(errors='replace').strip()[-200:]}")


def _post(url: str, alert: dict[str, Any], timeout: float) -> None:
    request = urllib.request.Request(
        url, json.dumps(alert).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        if answer.status >= 300:
            raise ValueError(f"the webhook answered {answer.status}")
