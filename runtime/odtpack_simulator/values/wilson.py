"""How much a share of right answers proves."""

from __future__ import annotations

import math
import statistics

_Z = statistics.NormalDist().inv_cdf(0.975)


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of the share that ``right`` of ``total`` answers estimate.

    With p = right / total and z the 97.5 % point of the normal distribution, its ends are::

        (p + z^2 / 2n  -+  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Unlike p -+ z sqrt(p (1 - p) / n) it holds for few answers, and for none or all right.
    It counts answers as independent; several labels of one sample are not, and the interval
    is then narrower than the truth.

    Source: Wilson (1927), Probable inference, the law of succession, and statistical
    inference, Journal of the American Statistical Association 22, 209-212.

    Args:
        right: Number of right answers.
        total: Number of answers. None prove nothing: the interval is (0, 1).

    Raises:
        ValueError: Not 0 <= right <= total.
    """
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
