"""How often a run may restart: no loop without progress."""

from __future__ import annotations


class Budget:
    """Counts restarts in a row that brought no new step.

    Args:
        restarts: how many there may be.
    """

    def __init__(self, restarts: int) -> None:
        self.restarts = restarts
        self.used = 0
        self.first_cause = ""
        self._best = 0

    def take(self, best_step: int, cause: str) -> bool:
        """Whether the run may restart once more; ``best_step`` is the furthest step that it has ever finished."""
        if best_step > self._best or not self.first_cause:
            self._best, self.used, self.first_cause = max(self._best, best_step), 0, cause
        if self.used >= self.restarts:
            return False
        self.used += 1
        return True
