"""Axes: round tick values, linear and logarithmic positions, short labels."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A range of values and where its ticks stand.

    Attributes:
        low: Value at position 0.
        high: Value at position 1, above ``low``.
        ticks: Values to label, ascending, inside the range.
        logarithmic: Positions follow the logarithm; ``low`` is positive then.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def position(self, value: float) -> float:
        """Share of the axis at which a value stands, 0 to 1; values outside stop at the ends."""
        if self.logarithmic:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def is_round(self, tick: float) -> bool:
        """Whether a tick is one to keep where there is little room: a power of ten."""
        if not self.logarithmic:
            return True
        exponent = math.log10(tick)
        return abs(exponent - round(exponent)) < 1e-9


def linear_axis(high: float, *, low: float = 0.0, count: int = 5) -> Axis:
    """An axis over ``low`` to ``high`` in about ``count`` steps of 1, 2, 2.5 or 5 times 10^n."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        low, high, span = min(low, high), min(low, high) + 1.0, 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(step * index for index in range(start, stop + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def log_axis(low: float, high: float) -> Axis:
    """A logarithmic axis with room at both ends and at most six round ticks where possible."""
    low, high = max(low, 1e-9) / 1.3, max(high, 1e-9) * 1.3
    densities = ((1.0, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 3.0, 5.0), (1.0, 2.0, 5.0), (1.0, 3.0))
    for multiples in (*densities, (1.0,)):
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [multiple * 10.0**exponent for exponent in exponents for multiple in multiples]
        ticks = tuple(value for value in values if low <= value <= high)
        if len(ticks) <= 6:
            break
    return Axis(low, high, ticks, logarithmic=True)


def duration_label(milliseconds: float) -> str:
    """A tick label without needless digits: ``50 ms``, ``2 s``."""
    if milliseconds < 1.0:
        return f"{milliseconds * 1e3:.3g} µs"
    if milliseconds < 1e3:
        return f"{milliseconds:.3g} ms"
    return f"{milliseconds / 1e3:.3g} s"
