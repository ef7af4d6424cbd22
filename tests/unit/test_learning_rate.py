"""The learning rate is a function of the step alone; values against torch's schedulers and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.train.learning_rate import learning_rate

SETTINGS = {"peak": 0.1, "total_steps": 100, "warmup_steps": 10, "decay_steps": None, "min_ratio": 0.1}


def rate(step: int, schedule: str, **changes: object) -> float:
    return learning_rate(step, schedule=schedule, **{**SETTINGS, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    assert [rate(step, schedule) for step in range(10)] == pytest.approx([0.01 * (step + 1) for step in range(10)])
    assert rate(10, schedule) == pytest.approx(0.1)


def test_cosine_equals_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=0.01)
    for step in range(90):
        assert rate(10 + step, "cosine") == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_linear_and_wsd_by_hand() -> None:
    assert rate(55, "linear") == pytest.approx(0.1 * (0.1 + 0.9 * 0.5))
    assert rate(100, "linear") == pytest.approx(0.01)
    assert rate(79, "wsd") == pytest.approx(0.1)
    assert rate(90, "wsd") == pytest.approx(0.1 * (0.1 + 0.9 * 0.5))
    assert rate(75, "wsd", decay_steps=50) == pytest.approx(0.1 * (0.1 + 0.9 * 0.5))


def test_the_rate_stays_at_the_minimum_after_the_decay() -> None:
    assert rate(500, "cosine", decay_steps=20) == pytest.approx(0.01)
    assert all(math.isfinite(rate(step, "wsd", total_steps=1, warmup_steps=0)) for step in range(3))
