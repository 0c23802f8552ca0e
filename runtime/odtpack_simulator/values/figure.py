"""A figure: every number that is judged, compared, suggested from or shown, and its check."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

from pydantic import Field

from odtpack_simulator.values.part import Part
from odtpack_simulator.values.units import Interval, format_interval_of, format_value

Text = Annotated[str, Field(max_length=4000)]
Unit = Literal["B", "ms", "s", "days", "J", "%", "share", "1"]
"""Of a figure: ``share`` is from 0 to 1 and read as a percentage, ``1`` a plain number."""
FigureKind = Literal["counted", "measured", "predicted", "published"]
Verdict = Literal["pass", "warn", "fail", "not judged"]
CheckStatus = Literal["pass", "fail", "not judged"]
CheckLevel = Literal["error", "warn"]
WORST_FIRST: Final[tuple[Verdict, ...]] = ("fail", "not judged", "warn", "pass")


class Basis(Part):
    """What two figures must have in common to be compared; null where it does not matter.

    Attributes:
        how: What the figure is of, or how it was found, where there is more than one way.
        host: The machine whose times it follows from.
        profile: Digest of the device profile that it rests on.
        training: What was trained and how: times of one training differ by chance alone.
    """

    how: Text = ""
    host: Text | None = None
    profile: Text | None = None
    training: Text | None = None


class Figure(Part):
    """One number of a result, with its unit and how well it is known.

    Attributes:
        metric: Key of its metric.
        subject: Name of the device; null for the whole package or federation.
        value: The figure; null if unknown.
        low: Low end of an estimate. With ``low`` and without ``high``, ``value`` is a lower bound.
        high: High end of an estimate.
        unit: Unit of value, low, high and noise.
        kind: Counted in files or graphs, measured, predicted from measurements, or published.
        basis: What another figure must have in common with it to be compared.
        noise: Low end, middle and high end of where chance alone may have put it.
        never: An unknown value never happens or is not finite; no limit allows that.
        reason: Why the value is unknown; of a known one, what to say with it.
    """

    metric: Text = ""
    subject: Text | None = None
    value: float | None
    low: float | None = None
    high: float | None = None
    unit: Unit = "1"
    kind: FigureKind = "counted"
    basis: Basis = Basis()
    noise: tuple[float, float, float] | None = None
    never: bool = False
    reason: Text = ""

    @property
    def shown(self) -> str:
        """The value with its unit, for people; a dash if unknown."""
        return "–" if self.value is None else format_value(self.value, self.unit)

    @property
    def ends(self) -> str:
        """Both ends of the estimate, for people; empty where they are one or unknown."""
        if self.low is None or self.high is None or self.low == self.high:
            return ""
        return format_interval_of(self.low, self.high, self.unit)


class Check(Part):
    """One assertion over a figure.

    ``actual`` and ``limit`` stand in ``unit``. ``baseline`` is what ``limit`` was computed from,
    where a budget says by how much a figure may grow ("+5 %").
    """

    metric: Text
    limit: float | None = None
    actual: float | None = None
    baseline: float | None = None
    unit: Unit = "1"
    level: CheckLevel = "error"
    status: CheckStatus
    message: Text
    advice: Text | None = None
    budget_location: Text | None = None

    @property
    def state(self) -> Verdict:
        """Status and level as one verdict."""
        return "warn" if self.status == "fail" and self.level == "warn" else self.status


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """``fail`` before ``not judged`` before ``warn`` before ``pass``, which nothing is as well."""
    found = set(verdicts)
    return next((verdict for verdict in WORST_FIRST if verdict in found), "pass")


def verdict_of(checks: Iterable[Check]) -> Verdict:
    """The verdict that follows from checks."""
    return worst_of(check.state for check in checks)


def listed(words: Sequence[str]) -> str:
    """Words in a sentence: ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def shortened(text: str, most: int = 1000) -> str:
    """Text of a result in a sentence: names and reasons of a file may be of any length."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


_LEFT_OUT: Final = {
    "checkpoint_load_ms": "loading checkpoints",
    "checkpoint_save_ms": "saving checkpoints",
    "power.idle": "subtracting idle power",
    "sustained_fraction": "throttling",
}
"""What the costs on a device may leave out, in words that follow "without"."""


def without(left_out: Sequence[str]) -> str:
    """What costs on a device do not count because it is unknown; empty for nothing."""
    words = [_LEFT_OUT.get(figure, figure.replace("_", " ")) for figure in left_out]
    what = shortened(listed(words), 200)
    return what and f"without {what}, which {'are' if len(words) > 1 else 'is'} unknown"


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
