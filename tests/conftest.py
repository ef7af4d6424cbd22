"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from meshwright.prove.pool import RankPool

# A drawn case may be slow on a busy machine, and the suite draws the same cases every time.
settings.register_profile("meshwright", deadline=None, derandomize=True)
settings.load_profile("meshwright")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(4).run(function, ...)``: pools of started Gloo ranks, reused for the whole session."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    yield pool
    for started in pools.values():
        started.close()
