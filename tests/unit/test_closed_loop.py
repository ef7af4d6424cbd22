"""The closed loop's judgement, and that every one of its layouts is legal and predicted."""

from __future__ import annotations

import pytest

from bench.closed_loop import LAYOUTS, MODELS, cases, judge, predict, spearman, table
from tests.unit.test_calibrate import CLUSTER


def test_there_are_layouts_of_every_kind_and_all_are_predicted() -> None:
    found = cases(list(MODELS))
    assert len(found) >= 16 and set(LAYOUTS) == set(MODELS)
    layouts = [case.job.layout for case in found]
    assert {layout.ranks for layout in layouts} == {1, 2, 3, 4}
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert len({layout.schedule for layout in layouts if layout.pp > 1}) >= 4
    assert any(layout.recompute == "full" for layout in layouts)
    predict(found, CLUSTER)
    assert all(case.predicted > 0 and sum(case.parts.values()) == pytest.approx(case.predicted) for case in found)


def test_a_perfect_prediction_passes_and_a_wrong_order_does_not() -> None:
    found = cases(["small llama"])
    predict(found, CLUSTER)
    for case in found:
        case.samples = [case.predicted * 1.05] * 3
    verdict = judge(found)
    assert verdict.passed
    assert verdict.median_error == pytest.approx(1 - 1 / 1.05)
    assert verdict.picks == {"small llama": pytest.approx(1.0)}
    assert "passed" in table(found, verdict)
    slowest = max(found, key=lambda case: case.predicted)
    for case in found:
        case.samples = [slowest.predicted**2 / case.predicted]
    assert not judge(found).passed


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 400]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
