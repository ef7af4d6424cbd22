"""State or arithmetic of a rank that turned out to be wrong, without any error."""

from __future__ import annotations

from collections.abc import Sequence


class CorruptState(RuntimeError):
    """Some ranks hold or compute other bits than they should; raised on all ranks.

    Args:
        message: one sentence.
        blamed: those ranks.
        good_step: the last step after which the state was right.
    """

    def __init__(self, message: str, blamed: Sequence[int], good_step: int) -> None:
        super().__init__(message)
        self.blamed, self.good_step = list(blamed), good_step
