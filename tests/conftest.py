"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from meshwright.prove.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(4).run(function, ...)``: pools of started Gloo ranks, reused for the whole session."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    yield pool
    for started in pools.values():
        started.close()
