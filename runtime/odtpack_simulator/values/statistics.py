"""What measured values prove: quantiles with intervals, and shares of right answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from odtpack_simulator.values.units import Interval

_TAIL: Final = (1 - 0.95) / 2  # On either side of a 95 % interval


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile between the two nearest values, linearly (type 7 of Hyndman and Fan, 1996)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    index = min(int(position), len(ordered) - 2) if len(ordered) > 1 else 0
    above = ordered[min(index + 1, len(ordered) - 1)]
    return ordered[index] + (above - ordered[index]) * (position - index)


def quantile_interval(values: Sequence[float], share: float) -> Interval:
    """A quantile, and two of the values between which that of the population lies."""
    # Of n independent values the number below the population's quantile is binomial with the chance
    # `share`, whatever their distribution. The l-th and the u-th smallest value enclose it with at
    # least 95 %, if either tail beyond them has at most half of the rest (David and Nagaraja,
    # "Order Statistics", 3rd edition, section 7.1). Where so few values cannot reach that, the
    # interval ends at the smallest or the largest, and covers less.
    ordered = sorted(values)
    count = len(ordered)
    low, high = 0, count - 1
    below = 0.0  # probability that at most k values lie below the quantile
    for k in range(count):
        below += math.comb(count, k) * share**k * (1 - share) ** (count - k)
        if below <= _TAIL:
            low = k
        if below >= 1 - _TAIL:
            high = k
            break
    typical = quantile(ordered, share)
    return Interval.of(min(ordered[low], typical), typical, max(ordered[high], typical))


_Z = statistics.NormalDist().inv_cdf(0.975)


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of the share that ``right`` of ``total`` answers estimate."""
    # With p = right / total and z the 97.5 % point of the normal distribution, its ends are:
    #     (p + z^2 / 2n  -+  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    # Unlike p -+ z sqrt(p (1 - p) / n) it holds for few answers, and for none or all right. It
    # counts answers as independent; several labels of one sample are not, and the interval is then
    # narrower than the truth.
    # Source: Wilson (1927), Probable inference, the law of succession, and statistical inference,
    # Journal of the American Statistical Association 22, 209-212.
    # `total`: Number of answers. None prove nothing: the interval is (0, 1).
    if not 0 <= right <= total:
        raise ValueError(f"{right} of {total} answers cannot be right")
    if total == 0:
        return 0.0, 1.0
    share, shrink = right / total, _Z**2 / total
    middle = share + shrink / 2
    half = math.sqrt(shrink * (share * (1 - share) + shrink / 4))
    # Rounding must not move an end past the share itself.
    low = min((middle - half) / (1 + shrink), share)
    high = max((middle + half) / (1 + shrink), share)
    return max(low, 0.0), min(high, 1.0)
