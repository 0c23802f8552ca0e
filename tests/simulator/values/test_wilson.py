"""The interval of a share, against published figures and its own definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odtpack_simulator.values.statistics import wilson_interval


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
