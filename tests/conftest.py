"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from meshwright.prove.pool import RankPool

# A drawn case may be slow on a busy machine, and the suite draws the same cases every time.
settings.register_profile("meshwright", deadline=None, derandomize=True)
settings.load_profile("meshwright")


EVERY_NTH = {
    "test_attention_masks.py": 5,
    "test_bench_contestants.py": 2,
    "test_compressed_ledger.py": 3,
    "test_compressed_sums.py": 2,
    "test_data_parallel.py": 6,
    "test_delayed.py": 3,
    "test_delayed_ledger.py": 3,
    "test_determinism.py": 2,
    "test_independent_count.py": 2,
    "test_layouts.py": 4,
    "test_pipeline.py": 5,
    "test_predicted_activations.py": 3,
    "test_predicted_flops.py": 3,
    "test_predicted_program.py": 2,
    "test_recompute.py": 5,
    "test_recorder.py": 2,
    "test_replicas.py": 3,
    "test_reported_faults.py": 2,
    "test_resume.py": 3,
    "test_sync_resume.py": 3,
    "test_tensor_parallel.py": 3,
    "test_trace.py": 3,
    "test_transformers.py": 4,
    "test_unequal.py": 2,
}
"""The large matrices: of each of their tests, every n-th case belongs to ``make test``; the others are ``all``."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what a sample leaves out, before ``-m`` chooses."""
    seen: dict[tuple[str, str], int] = {}
    for item in items:
        step = EVERY_NTH.get(item.path.name)
        if step is None or item.get_closest_marker("all"):
            continue
        test = item.path.name, getattr(item, "originalname", item.name)
        number = seen.get(test, 0)
        seen[test] = number + 1
        if number % step:
            item.add_marker(pytest.mark.all)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(4).run(function, ...)``: pools of started Gloo ranks, reused for the whole session."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    yield pool
    for started in pools.values():
        started.close()
