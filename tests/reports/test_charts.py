import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odtpack_simulator.reports import charts
from odtpack_simulator.reports.svg import element, linear_axis, log_axis, number
from odtpack_simulator.result import EvaluationPoint
from odtpack_simulator.values.units import Interval


def polyline(markup: str, style: str) -> list[list[tuple[float, float]]]:
    """The stretches of a path as (x, y up) shares."""
    data = re.findall(rf'd="([^"]*)" class="{style}"', markup)[0]
    stretches: list[list[tuple[float, float]]] = []
    for command, x, y in re.findall(r"([ML])([\d.]+) ([\d.]+)", data):
        if command == "M":
            stretches.append([])
        stretches[-1].append((float(x) / 1000, 1 - float(y) / 1000))
    return stretches


def test_element_escapes():
    text = element("text", 'a<b>&"', x="\"><script>alert('x')</script>", class_="note", dy=None)
    assert "<script>" not in text
    assert text.startswith('<text x="&#34;&gt;')
    assert text.endswith("a&lt;b&gt;&amp;&#34;</text>")
    assert element("svg", view_box="0 0 1 1", stroke_width=1.0) == (
        '<svg viewBox="0 0 1 1" stroke-width="1"></svg>'
    )


@given(st.floats(-1e6, 1e6))
def test_numbers_are_short_decimals(value):
    assert float(number(value)) == pytest.approx(value, abs=5.1e-4)
    assert "e" not in number(value)


@given(st.floats(1e-3, 1e9))
def test_linear_axis_covers_its_values_in_few_round_steps(high):
    axis = linear_axis(high)
    assert axis.low == 0
    assert axis.high >= high * (1 - 1e-9)
    assert 3 <= len(axis.ticks) <= 8
    step = axis.ticks[1]
    assert any(
        math.isclose(step / 10.0 ** math.floor(math.log10(step) + 1e-9), m, rel_tol=1e-6)
        for m in (1, 2, 2.5, 5)
    )
    assert axis.position(0) == 0
    assert axis.position(axis.high) == 1


@given(st.floats(1e-3, 1e6), st.floats(1.0, 1e5))
def test_log_axis_covers_its_values(low, ratio):
    axis = log_axis(low, low * ratio)
    assert 0 < axis.position(low) <= axis.position(low * ratio) < 1
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    middle = math.sqrt(low * low * ratio)
    ends = (axis.position(low) + axis.position(low * ratio)) / 2
    assert axis.position(middle) == pytest.approx(ends, abs=1e-6)


def test_linear_axis_survives_odd_ranges():
    for high, low in ((0.0, 0.0), (-3.0, -3.0), (math.inf, 0.0), (-1.0, 5.0)):
        axis = linear_axis(high, low=low)
        assert axis.high > axis.low


def test_loss_curve_stands_at_its_values():
    markup = charts.loss_chart([1.0, 3.0, None, 2.0], 4.0, 0.5)
    axis = linear_axis(4.4)
    expected = [[(0.25, 1.0 / axis.high), (0.5, 3.0 / axis.high)], [(1.0, 2.0 / axis.high)]]
    found = polyline(markup, "series")
    assert [len(stretch) for stretch in found] == [2, 1]
    for stretch, wanted in zip(found, expected, strict=True):
        for point, want in zip(stretch, wanted, strict=True):
            assert point == pytest.approx(want, abs=2e-6)
    assert "held-out before: 4" in markup
    assert "held-out after: 0.5" in markup


def test_long_curves_are_thinned_but_keep_their_extremes():
    losses: list[float | None] = [1.0] * 20_000
    losses[7_777], losses[12_345] = 9.0, 0.25
    markup = charts.loss_chart(losses, None, None)
    points = [point for stretch in polyline(markup, "series faint") for point in stretch]
    assert len(points) < 1300
    axis = linear_axis(9.9)
    assert max(y for _, y in points) == pytest.approx(9.0 / axis.high, abs=1e-5)
    assert min(y for _, y in points) == pytest.approx(0.25 / axis.high, abs=1e-5)
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_timeline_is_a_staircase_with_its_peak_marked():
    markup = charts.timeline_chart([10_000_000, 30_000_000, 20_000_000])
    axis = linear_axis(33.0)
    heights = [round(y * axis.high, 3) for _, y in polyline(markup, "series")[0]]
    assert heights == [10, 10, 30, 30, 20, 20]
    assert "peak 30.0 MB" in markup


def test_limit_bar_stands_at_its_shares():
    scale = linear_axis(2.0, count=4)
    markup = charts.limit_bar(0.5, 1.5, scale, over=True)
    bar = re.search(r'width="([\d.]+)%"[^>]*class="bar over"', markup)
    tick = re.search(r'x1="([\d.]+)%"[^>]*class="tick-mark"', markup)
    limit = re.search(r'x1="([\d.]+)%"[^>]*class="limit"', markup)
    assert [float(m[1]) for m in (bar, tick, limit) if m] == [25.0, 75.0, 50.0]


def test_interval_stands_on_the_logarithm():
    axis = log_axis(10.0, 1000.0)
    markup = charts.interval_bar(Interval(low=10, typical=100, high=1000), axis, 100.0)
    dot = re.search(r'cx="([\d.]+)%"', markup)
    limit = re.search(r'x1="([\d.]+)%"[^>]*class="limit"', markup)
    assert dot[1] == limit[1] == "50"


def test_held_out_losses_stand_at_their_steps():
    points = [EvaluationPoint(step=0, loss=4.0), EvaluationPoint(step=2, loss=1.0)]
    markup = charts.loss_chart([2.0, 2.0, 2.0, 2.0], 4.0, None, points)
    axis = linear_axis(4.4)
    found = polyline(markup, "series second")[0]
    assert found[0] == pytest.approx((0.0, 4.0 / axis.high), abs=2e-6)
    assert found[1] == pytest.approx((0.5, 1.0 / axis.high), abs=2e-6)


def test_limits_within_range_become_lines_and_the_others_are_named():
    limits = [("c", 500), ("a", 90), ("b", 92), ("d", 150), ("e", 171)]
    lines, beyond = charts.limit_lines(100, limits)
    assert [(line.letter, line.limit_bytes, line.devices) for line in lines] == [
        ("A", 90, ("a", "b")),
        ("B", 150, ("d",)),
    ]
    assert beyond == [("e", 171), ("c", 500)]
    assert charts.limit_lines(0, limits) == ([], sorted(limits, key=lambda limit: limit[1]))


def test_limit_lines_stand_at_their_bytes():
    lines, _ = charts.limit_lines(30_000_000, [("a", 40_000_000)])
    markup = charts.timeline_chart([10_000_000, 30_000_000], lines)
    axis = linear_axis(44.0)
    line = re.search(r'y1="([\d.]+)%"[^>]*class="limit"', markup)
    assert 1 - float(line[1]) / 100 == pytest.approx(40 / axis.high, abs=1e-5)
    assert "limit A 40.0 MB" in markup


def test_a_small_curve_ends_at_its_last_point():
    markup = charts.curve_chart([(0.0, 0.1), (2.0, 0.6), (4.0, 0.9)], "alt")
    assert polyline(markup, "series")[0] == [
        pytest.approx(point, abs=2e-6) for point in ((0.0, 0.1), (0.5, 0.6), (1.0, 0.9))
    ]
    assert 'aria-label="alt"' in markup


def test_whole_numbers_have_whole_ticks():
    markup = charts.curve_chart([(0.0, 1.0), (3.0, 2.0)], "alt", whole=True)
    assert re.findall(r'dy="18"[^>]*>([^<]*)<', markup) == ["0", "1", "2", "3"]


def test_interruptions_stand_at_their_steps():
    markup = charts.event_row([(0.5, 0.25)], "M0 0")
    assert ("25", "50") in re.findall(r'x1="([\d.]+)%" x2="([\d.]+)%"', markup)
    assert 'x="50%"' in markup


def test_drawings_of_nothing():
    assert "<svg" in charts.loss_chart([], None, None)
    assert "<svg" in charts.loss_chart([None, None], None, None)
    assert "<svg" in charts.timeline_chart([])
    assert "<svg" in charts.timeline_chart([0, 0])
    assert "<svg" in charts.curve_chart([(0.0, 0.0), (0.0, 0.0)], "alt")
    assert "<svg" in charts.pair_bar(0.0, None, 0.0)


def test_the_name_of_a_narrow_part_stays_within_the_drawing():
    parts = [("forward", 0), ("backward", 3), ("update", 27)]
    drawn = charts.timeline_chart([1_000_000] * 30, parts=parts)
    found = re.findall(
        r'<text x="([\d.]+%)"[^>]*text-anchor="(\w+)" class="part-name">(\w+)', drawn
    )
    assert found == [
        ("0%", "start", "forward"), ("50%", "middle", "backward"), ("100%", "end", "update")
    ]  # fmt: skip
