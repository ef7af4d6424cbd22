"""What a supervisor runs: the plan of a whole run, and one start of all its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.job.job import Job
from meshwright.job.recovery_section import RecoverySection
from meshwright.recovery.endings import Ending

Replan = Callable[[Job, int], Job | None]
"""A resolved job and how many ranks are left: the job on a layout of at most so many; None: there is none."""


@dataclass(kw_only=True)
class Plan:
    """What is to be supervised."""

    run_directory: Path
    ranks: int
    module: str
    arguments: Sequence[str]
    port: int
    grace_seconds: float
    environment: Mapping[str, str]
    section: RecoverySection
    job: Job | None = None
    """Of the run; None: the module is no training, and is never started again."""
    replan: Replan | None = None


@dataclass
class Generation:
    """One start of all ranks."""

    number: int
    ranks: int
    logs: Path
    began: float
    endings: dict[int, Ending] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    """Ranks that were told to end."""


def stopped_by_signal(generation: Generation) -> bool:
    """Whether the ranks ended because of the signal, not because they were done or decided to."""
    return any(
        ending.state == "stopped" and ending.error.startswith("stopped by a signal")
        for ending in generation.endings.values()
    )


def new_log_folder(run_directory: Path) -> Path:
    """``logs/attempt-N`` with the next free N: a resumed run keeps the logs of those before it."""
    root = run_directory / "logs"
    taken = [int(path.name.removeprefix("attempt-")) for path in root.glob("attempt-[0-9]*")]
    folder = root / f"attempt-{max(taken, default=0) + 1}"
    folder.mkdir(parents=True)
    return folder.absolute()
