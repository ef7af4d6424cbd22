"""Ratios of interleaved rounds."""

from __future__ import annotations

import pytest

from bench.statistics import paired_ratio


def test_what_slows_both_cancels() -> None:
    ours = [1.0, 4.0, 2.0, 1.0, 9.0, 1.0, 3.0]
    ratio = paired_ratio([1.2 * seconds for seconds in ours], ours)
    assert ratio.median == pytest.approx(1.2) and ratio.low == pytest.approx(1.2) and ratio.high == pytest.approx(1.2)


def test_interval_holds_the_median_and_widens_with_noise() -> None:
    ours = [1.0] * 9
    quiet = paired_ratio([1.10, 1.11, 1.09, 1.10, 1.12, 1.08, 1.10, 1.11, 1.09], ours)
    noisy = paired_ratio([1.10, 1.51, 0.79, 1.00, 1.32, 0.88, 1.30, 1.11, 0.89], ours)
    assert quiet.low <= quiet.median <= quiet.high < 1.13
    assert noisy.high - noisy.low > 5 * (quiet.high - quiet.low)
    assert noisy.low < 1 < noisy.high, "such a ratio is not resolved"


def test_unpaired_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 1 rounds cannot be paired"):
        paired_ratio([1.0, 2.0], [1.0])
