import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odtpack_simulator.values.figure import quantile, quantile_interval, wilson_interval
from odtpack_simulator.values.units import (
    UNITS,
    Interval,
    format_bytes,
    format_duration,
    format_energy,
    format_interval,
    format_limit,
    format_value,
    parse_quantity,
)


@pytest.mark.parametrize(("text", "dimension", "expected"), [
    ("12 MB", "bytes", 12_000_000), ("12MB", "bytes", 12_000_000),
    (" 12 MiB ", "bytes", 12 * 1024 * 1024), ("1.5 GiB", "bytes", 1_610_612_736),
    ("0 B", "bytes", 0), ("50 ms", "duration", 0.05), ("10 min", "duration", 600),
    ("1e3 us", "duration", 0.001), ("20 %", "ratio", 0.2), ("4.8 GB/s", "bandwidth", 4.8e9),
])  # fmt: skip
def test_reads_strictly(text, dimension, expected):
    assert parse_quantity(text, dimension) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("text", "dimension", "message"), [
    ("12", "bytes", "with a unit"), ("MB", "bytes", "with a unit"), ("", "bytes", "with a unit"),
    ("-1 MB", "bytes", "with a unit"), ("nan MB", "bytes", "with a unit"),
    ("12 Mb", "bytes", "did you mean MB"), ("12 KB", "bytes", "did you mean kB"),
    ("12 mb", "bytes", "did you mean MB"), ("12 MB/s", "bytes", "not a unit of bytes"),
    ("12 sec", "duration", "not a unit of duration"), ("1e999 MB", "bytes", "finite"),
    ("1 2 MB", "bytes", "with a unit"), ("0.2 1", "ratio", "with a unit"),
    ("0.2", "percentage", 'with a unit, such as "20 %"'), ("20 pct", "percentage", "allowed: %$"),
    ("١٢ MB", "bytes", "with a unit"),
])  # fmt: skip
def test_refuses(text, dimension, message):
    with pytest.raises(ValueError, match=message):
        parse_quantity(text, dimension)


@given(st.integers(1, 10**6), st.sampled_from(["kB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_prefixes_against_exact_arithmetic(number, unit):
    base = 1024 if "i" in unit else 1000
    exact = Fraction(number) * base ** (
        "kMG".index(unit[0].lower() if unit[0] == "K" else unit[0]) + 1
    )
    assert parse_quantity(f"{number} {unit}", "bytes") == float(exact)


@given(st.integers(1, 10**7), st.sampled_from([(d, u) for d, us in UNITS.items() for u in us]))
def test_fractions_are_those_that_were_written(hundredths, unit):
    """2.01 kB are 2,010 bytes, not 2,009.9999999999998, which 2,010 bytes would be over."""
    dimension, name = unit
    if name == "1":
        return
    text = f"{hundredths // 100}.{hundredths % 100:02d}"
    exact = Fraction(text) * Fraction(repr(UNITS[dimension][name]))
    assert parse_quantity(f"{text} {name}", dimension) == float(exact)
    assert parse_quantity(f"{text} {name}", dimension, 1e3) == float(1000 * exact)


def test_writes_for_people():
    assert [format_bytes(n) for n in (0, 999, 1000, 34_216, 999_600, 1_611_000_000)] == [
        "0 B", "999 B", "1.00 kB", "34.2 kB", "1.00 MB", "1.61 GB",
    ]  # fmt: skip
    assert [format_duration(s) for s in (0.00085, 0.0082, 42.0, 744.0, 11_160.0)] == [
        "850 µs", "8.20 ms", "42.0 s", "12.4 min", "3.10 h",
    ]  # fmt: skip
    assert [format_energy(j) for j in (0.5, 850.0, 12_400.0, 1_204_000.0)] == [
        "0.500 J", "850 J", "12.4 kJ", "1.20 MJ",
    ]  # fmt: skip
    assert [format_duration(s) for s in (0.0009994, 0.0009996, 0.9994, 0.9996)] == [
        "999 µs", "1.00 ms", "999 ms", "1.00 s",
    ]  # fmt: skip
    days = [format_value(value, "days") for value in (7.5e-6, 1 / 3, 1.00001, 5.25)]
    assert days == ["648 ms", "8.00 h", "1 day", "5.25 days"]
    assert format_value(41.0, "%") == "41.0 %"
    assert format_value(100.0, "%") == "100.0 %"
    assert format_value(99.97, "%") == "99.97 %"
    assert format_value(100.0004, "%") == "100.0004 %"
    assert format_value(-99.9999, "%") == "-99.9999 %"
    assert format_value(100 - 1e-12, "%") == "100.000000 %"
    assert format_limit(99.9999, "%") == "99.9999 %"
    assert format_value(12_400.0, "J") == "12.4 kJ"
    assert format_limit(60.0, "s") == "60 s"
    assert format_limit(20.0, "%") == "20 %"


def test_interval_is_written_in_one_unit():
    assert format_interval(Interval(low=21, typical=40, high=72), "ms") == "21.0 to 72.0 ms"
    assert format_interval(Interval(low=105, typical=132, high=194), "s") == "1.75 to 3.23 min"
    assert format_interval(Interval(low=800, typical=900, high=1500), "ms") == "0.800 to 1.50 s"


@given(st.floats(1e-9, 1e12))
def test_a_written_number_keeps_three_digits(value):
    number, unit = format_bytes(value).split(" ")
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert float(number) * factor == pytest.approx(value, rel=6e-3, abs=0.51)
    assert math.isfinite(float(number))


def test_interval_must_be_ordered():
    with pytest.raises(ValueError, match="low <= typical <= high"):
        Interval(low=2, typical=1, high=3)


def test_small_shares_keep_two_digits():
    assert format_value(0.0057, "%") == "0.0057 %"
    assert format_limit(0.0057, "%") == "0.0057 %"
    assert format_limit(0.12, "%") == "0.12 %"
    assert format_value(0.0, "%") == "0.0 %"
    assert format_value(0.999, "%") == "1.0 %"
    assert format_value(16.06, "%") == "16.1 %"
    assert format_value(-0.25, "%") == "-0.25 %"


# Quantiles with intervals: tables of the sign test, and how often they cover the truth.


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # Conover, "Practical Nonparametric Statistics", table A3: at most 2.5 % in either tail.
    [(6, 1, 6), (9, 2, 8), (10, 2, 9), (20, 6, 15), (25, 8, 18), (40, 14, 27)],
)
def test_median_as_in_tables(count, low, high):
    found = quantile_interval(range(1, count + 1), 0.5)
    assert (found.low, found.high) == (low, high)
    assert found.typical == (count + 1) / 2


def test_too_few_values_give_all_there_is():
    found = quantile_interval([3.0, 1.0, 2.0], 0.9)
    assert (found.low, found.high) == (1, 3)  # two of three: below 95 % whatever one takes
    assert found.typical == pytest.approx(2.8)
    one = quantile_interval([5.0], 0.5)
    assert (one.low, one.typical, one.high) == (5, 5, 5)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_covers_the_truth_as_often_as_it_says(share):
    """Times with a long tail, as steps have; the exponential's quantile is known."""
    random, trials = np.random.default_rng(11), 2000
    truth = -np.log(1 - share)
    inside = 0
    for _ in range(trials):
        found = quantile_interval(list(random.exponential(size=40)), share)
        inside += found.low <= truth <= found.high
    assert inside / trials > 0.94  # at least 95 %, less three standard deviations


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantile_as_numpy_has_it(values, share):
    assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)), abs=1e-6)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.05, 0.95))
def test_ordered(values, share):
    found = quantile_interval(values, share)
    assert min(values) <= found.low <= found.typical <= found.high <= max(values)


# The interval of a share, against published figures and its own definition.


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
     (1, 29, 0.0061, 0.1718)],
)  # fmt: skip
def test_published_figures(right, total, low, high):
    """Newcombe (1998), Two-sided confidence intervals for the single proportion, table I."""
    assert wilson_interval(right, total) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(total - right, total) == pytest.approx((1 - high, 1 - low), abs=5e-5)


@given(total=st.integers(1, 10**6), data=st.data())
def test_ends_are_where_the_score_test_rejects(total, data):
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


def test_nothing_proves_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("right", "total"), [(3, 2), (-1, 2), (0, -1)])
def test_impossible_counts(right, total):
    with pytest.raises(ValueError, match="cannot be right"):
        wilson_interval(right, total)
