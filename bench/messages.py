"""What a rank says to the bench: apart from `bench.rank`, which runs as `__main__`, so that it can be pickled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """The contestant is built."""

    base_bytes: int
    """Resident memory before it was built: the interpreter, torch and the contestant's own libraries."""


@dataclass(frozen=True)
class Stepped:
    """Some steps are done."""

    losses: list[float | None]
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    """Largest resident memory of the process so far."""


@dataclass(frozen=True)
class Failed:
    """It raised; here is how."""

    text: str
