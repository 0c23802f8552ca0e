"""The Pareto set against its definition, on points with many ties."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from odtpack.fit.outcome import Point, beaten_by, choose, on_grid

COSTS = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, math.inf])
POINTS = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.tuples(*[COSTS] * n), min_size=1, max_size=12)
)


def better(one: Point, other: Point) -> bool:
    """The definition, spelled out."""
    somewhere = False
    for a, b in zip(one, other, strict=True):
        if a > b:
            return False
        somewhere = somewhere or a < b
    return somewhere


@given(POINTS)
def test_every_point_but_the_set_is_beaten_by_a_member_of_it(points: list[Point]) -> None:
    best = [i for i, p in enumerate(points) if not any(better(q, p) for q in points)]
    for index, by in enumerate(beaten_by(points)):
        assert by == [i for i in best if better(points[i], points[index])]
        assert bool(by) == (index not in best)
    assert choose(points, len(points)) == best


def test_of_a_large_set_each_cost_keeps_its_best() -> None:
    points = [(1.0, 9.0, 5.0), (2.0, 8.0, 4.0), (3.0, 7.0, 6.0), (4.0, 1.0, 7.0), (5.0, 6.0, 1.0)]
    assert choose(points, 3) == [0, 3, 4]
    assert choose(points, 4) == [0, 1, 3, 4]


@given(
    st.floats(1e-6, 1e12),
    st.floats(1e-6, 1e12),
    st.sampled_from([0.0, 0.01, 0.05]),
)
def test_a_grid_keeps_the_order_and_tells_apart_what_differs_by_more(
    one: float, other: float, tolerance: float
) -> None:
    low, high = sorted((one, other))
    assert on_grid(low, tolerance) <= on_grid(high, tolerance)
    if high > low * (1 + tolerance) * (1 + 1e-9):
        assert on_grid(low, tolerance) < on_grid(high, tolerance)


def test_a_grid_puts_nothing_first_and_the_unknown_last() -> None:
    assert on_grid(0.0, 0.05) < on_grid(1e-300, 0.05)
    assert on_grid(math.nan, 0.05) == on_grid(math.inf, 0.0) == math.inf
    assert on_grid(100.0, 0.05) == on_grid(100.5, 0.05)
