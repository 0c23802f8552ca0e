"""Quantiles with intervals: tables of the sign test, and how often they cover the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odtpack_simulator.values.statistics import quantile, quantile_interval, wilson_interval


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # Conover, "Practical Nonparametric Statistics", table A3: at most 2.5 % in either tail.
    [(6, 1, 6), (9, 2, 8), (10, 2, 9), (20, 6, 15), (25, 8, 18), (40, 14, 27)],
)
def test_median_as_in_tables(count: int, low: int, high: int) -> None:
    found = quantile_interval(range(1, count + 1), 0.5)
    assert (found.low, found.high) == (low, high)
    assert found.typical == (count + 1) / 2


def test_too_few_values_give_all_there_is() -> None:
    found = quantile_interval([3.0, 1.0, 2.0], 0.9)
    assert (found.low, found.high) == (1, 3)  # two of three: below 95 % whatever one takes
    assert found.typical == pytest.approx(2.8)
    one = quantile_interval([5.0], 0.5)
    assert (one.low, one.typical, one.high) == (5, 5, 5)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_covers_the_truth_as_often_as_it_says(share: float) -> None:
    """Times with a long tail, as steps have; the exponential's quantile is known."""
    random, trials = np.random.default_rng(11), 2000
    truth = -np.log(1 - share)
    inside = 0
    for _ in range(trials):
        found = quantile_interval(list(random.exponential(size=40)), share)
        inside += found.low <= truth <= found.high
    assert inside / trials > 0.94  # at least 95 %, less three standard deviations


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantile_as_numpy_has_it(values: list[float], share: float) -> None:
    assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)), abs=1e-6)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.05, 0.95))
def test_ordered(values: list[float], share: float) -> None:
    found = quantile_interval(values, share)
    assert min(values) <= found.low <= found.typical <= found.high <= max(values)


# The interval of a share, against published figures and its own definition.


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
     (1, 29, 0.0061, 0.1718)],
)  # fmt: skip
def test_published_figures(right: int, total: int, low: float, high: float) -> None:
    """Newcombe (1998), Two-sided confidence intervals for the single proportion, table I."""
    assert wilson_interval(right, total) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(total - right, total)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


@given(total=st.integers(1, 10**6), data=st.data())
def test_ends_are_where_the_score_test_rejects(total: int, data: st.DataObject) -> None:
    """At an end e, the observed share is 1.96 standard errors of e away from e."""
    right = data.draw(st.integers(0, total))
    share = right / total
    for end in wilson_interval(right, total):
        assert 0 <= end <= 1
        if 0 < end < 1:
            score = abs(share - end) / math.sqrt(end * (1 - end) / total)
            assert score == pytest.approx(1.959963985, rel=1e-4)
    low, high = wilson_interval(right, total)
    assert low <= share <= high
    assert low < high


def test_nothing_proves_nothing() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("right", "total"), [(3, 2), (-1, 2), (0, -1)])
def test_impossible_counts(right: int, total: int) -> None:
    with pytest.raises(ValueError, match="cannot be right"):
        wilson_interval(right, total)
