"""Quantiles of measured times with confidence intervals that assume no distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from odtpack_simulator.values.units import Interval

CONFIDENCE: Final = 0.95


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile between the two nearest values, linearly (type 7 of Hyndman and Fan, 1996).

    Args:
        values: At least one.
        share: 0 to 1; 0.5 is the median.
    """
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    index = min(int(position), len(ordered) - 2) if len(ordered) > 1 else 0
    above = ordered[min(index + 1, len(ordered) - 1)]
    return ordered[index] + (above - ordered[index]) * (position - index)


def quantile_interval(
    values: Sequence[float], share: float, *, confidence: float = CONFIDENCE
) -> Interval:
    """A quantile, and two of the values between which that of the population lies.

    Of n independent values the number below the population's quantile is binomial
    with the chance ``share``, whatever their distribution. The l-th and the u-th
    smallest value enclose it with at least the confidence asked for, if either tail
    beyond them has at most half of the rest (David and Nagaraja, "Order Statistics",
    3rd edition, section 7.1). Where so few values cannot reach that, the interval
    ends at the smallest or the largest, and covers less.

    Args:
        values: At least one.
        share: Of the quantile, between 0 and 1.
        confidence: Probability that the interval covers it, between 0 and 1.
    """
    ordered = sorted(values)
    count, tail = len(ordered), (1 - confidence) / 2
    low, high = 0, count - 1
    below = 0.0  # probability that at most k values lie below the quantile
    for k in range(count):
        below += math.comb(count, k) * share**k * (1 - share) ** (count - k)
        if below <= tail:
            low = k
        if below >= 1 - tail:
            high = k
            break
    typical = quantile(ordered, share)
    return Interval(
        low=min(ordered[low], typical), typical=typical, high=max(ordered[high], typical)
    )
