"""Times with a unit that fits their size."""

from __future__ import annotations

_PARTS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def scaled(time: float, unit: str = "s") -> tuple[float, str]:
    """``0.02`` seconds as ``(20.0, "ms")``; other units stay as they are."""
    if unit != "s" or time <= 0:
        return time, unit
    part, name = next((one for one in _PARTS if time >= one[0]), _PARTS[-1])
    return time / part, name
