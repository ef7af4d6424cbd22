"""The contestants of the bench that need nothing but torch do the same work as meshwright's own step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.contestants import FAMILIES, ONE_DEVICE, Contestant
from bench.workload import Workload
from meshwright.prove.pool import RankPool

SMALL = Workload(vocabulary=96, hidden=32, layers=4, heads=4, ffn_hidden=48, sequence=16, batch=8, lr=1e-3)
STEPS = 3
NEEDS_TORCH_ONLY = ("ours", "torch_loops", "tensor_loop", "pipeline_loop")


def losses_of(contestant: Contestant, work: Workload) -> list[float | None]:
    step = contestant.build(work)
    return [step(number) for number in range(STEPS)]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return [loss for loss in losses_of(ONE_DEVICE, SMALL) if loss is not None]


@pytest.mark.parametrize(
    "contestant",
    [
        pytest.param(contestant, id=contestant.name)
        for family in FAMILIES.values()
        for contestant in family
        if contestant.module in NEEDS_TORCH_ONLY
    ],
)
def test_same_losses(ranks: Callable[[int], RankPool], contestant: Contestant, expected: list[float]) -> None:
    by_rank = ranks(2).run(losses_of, contestant, SMALL)
    for number, loss in enumerate(expected):
        known = [losses[number] for losses in by_rank if losses[number] is not None]
        assert sum(known) / len(known) == pytest.approx(loss, rel=2e-5), f"step {number}"
