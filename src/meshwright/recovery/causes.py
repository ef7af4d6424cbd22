"""What a failure is called: out of memory, a full disk and a port clash by name, the rest by signal or exit code."""

from __future__ import annotations

import re
from pathlib import Path

_NAMES = (
    (re.compile(r"MemoryError|can't allocate memory|Cannot allocate memory|std::bad_alloc|out of memory", re.I),
     "out of memory"),
    (re.compile(r"No space left on device|Disk quota exceeded|bytes free but the checkpoint needs", re.I), "disk full"),
    (re.compile(r"Address already in use|EADDRINUSE", re.I), "port in use"),
    (re.compile(r"Input/output error", re.I), "input/output error"),
)  # fmt: skip
PEER_LOST = (
    "closed by peer", "reset by peer", "broken pipe", "connection refused", "timed out", "remote process",
    "of its group of", "socket closed", "connection was likely closed", "no route to host", "network is unreachable",
)  # fmt: skip
"""What a rank says when one it was talking to is gone: a consequence, not the cause."""


def lost_a_peer(error: str) -> bool:
    """Whether an error says that another rank is gone."""
    return any(text in error.lower() for text in PEER_LOST)


def named_cause(error: str, exit_code: int | None, oom_kills: int) -> str:
    """What a failure is called; empty when it has no name of its own.

    Args:
        error: what the rank said, if it could.
        exit_code: below 0: the signal that ended it.
        oom_kills: processes that the kernel has ended for want of memory since the run began.
    """
    if exit_code == -9 and oom_kills:
        return "host out of memory"
    if lost_a_peer(error):
        return ""
    return next((name for pattern, name in _NAMES if pattern.search(error)), "")


def oom_kill_count() -> int:
    """How many processes the kernel has ended for want of memory: in our control group, or else on this host."""
    for path in _cgroup_events():
        if (count := _field(path, "oom_kill")) is not None:
            return count
    return _field(Path("/proc/vmstat"), "oom_kill") or 0


def _cgroup_events() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    relative = [line.partition("::")[2].lstrip("/") for line in lines if line.startswith("0::")]
    root = Path("/sys/fs/cgroup")
    return [root / each / "memory.events" for each in relative] + [root / "memory.events"]


def _field(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        return None
    return None
