"""The global order of samples: a function of the seed and a position, so the data state is one integer.

Position g of a run is sample ``permutation(seed, g // n)[g % n]`` of n samples. Nothing here knows the number of
ranks; a run that stops after ``cursor`` samples continues at position ``cursor`` on any layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError


def permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of ``count`` samples in ``epoch``: sorted by 64 random bits each, Philox4x64-10 keyed by both.

    The raw stream of a numpy bit generator is fixed for ever, unlike ``Generator.permutation``.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    random = np.random.Philox(key=key).random_raw(count)
    return np.argsort(random, kind="stable").astype(np.int64)


@dataclass
class Order:
    """Sample numbers by position.

    Attributes:
        count: Samples in an epoch.
        seed: Of the order.
        shuffle: False gives 0, 1, ..., count - 1 in every epoch.
    """

    count: int
    seed: int = 0
    shuffle: bool = True
    _cached: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"the order of {self.count} samples is empty; give a corpus with at least one sample")

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """All samples of one epoch in order, ``[count]``."""
        if epoch not in self._cached:
            while len(self._cached) >= 2:  # a batch spans two epochs at most when it is no longer than one
                self._cached.pop(min(self._cached), None)
            order = permutation(self.seed, epoch, self.count) if self.shuffle else np.arange(self.count, dtype=np.int64)
            self._cached[epoch] = order
        return self._cached[epoch]

    def samples(self, cursor: int, count: int) -> NDArray[np.int64]:
        """The samples at positions ``cursor`` to ``cursor + count - 1``, across epoch ends, ``[count]``."""
        if cursor < 0:
            raise InputError(f"the data cursor {cursor} is negative; it counts samples consumed from 0")
        parts: list[NDArray[np.int64]] = []
        position, end = cursor, cursor + count
        while position < end:
            epoch, offset = divmod(position, self.count)
            taken = min(self.count - offset, end - position)
            parts.append(self.epoch(epoch)[offset : offset + taken])
            position += taken
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
