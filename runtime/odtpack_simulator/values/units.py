"""Numbers with units, and figures with a source: the one table of units, reading and writing.

Every quantity has one base unit in which the code computes: bytes, bytes per
second, hertz, floating-point operations per second, seconds, watts, joules,
and plain fractions. Decimal prefixes are powers of 1000 (``MB``), binary ones
powers of 1024 (``MiB``); the spelling is case-sensitive because ``Mb`` means
megabits, and guessing must not be needed.
"""

from __future__ import annotations

import decimal
import difflib
import math
import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from odtpack_simulator.values.part import TAG_PREFIX, Part

_DECIMAL: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

UNITS: Final[dict[str, dict[str, float]]] = {
    "bytes": {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()},
    "bandwidth": {f"{p}B/s": f for p, f in (_DECIMAL | _BINARY).items()},
    "frequency": {"Hz": 1.0, "kHz": 1e3, "MHz": 1e6, "GHz": 1e9},
    "compute": {"MFLOPS": 1e6, "GFLOPS": 1e9, "TFLOPS": 1e12},
    "duration": {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0},
    "power": {"mW": 1e-3, "W": 1.0},
    "energy": {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "mWh": 3.6, "Wh": 3600.0},
    "ratio": {"1": 1.0, "%": 0.01},
    "percentage": {"%": 0.01},  # a ratio in quotes, where a number alone would be read as percent
    "count": {"cores": 1.0},
}
"""Dimension -> unit -> factor to the base unit of the dimension."""

_EXACT: Final = decimal.Context(prec=60, traps=[])
"""Products of decimal numbers as people write them; beyond all numbers is infinite, no error."""

_MOST_PLACES: Final = 6  # Of a percentage that is nearly 100: beyond them it is called 100

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([^\s\d.,+-]\S*)\s*")


class Interval(Part):
    """A figure known only between two bounds: ``low <= typical <= high``, all finite.

    The three stand in one unit, which the field that holds the interval names.
    """

    low: float = Field(ge=0)
    typical: float = Field(ge=0)
    high: float = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Interval:
        if not self.low <= self.typical <= self.high:
            raise ValueError("an interval needs low <= typical <= high")
        return self

    @classmethod
    def of(cls, low: float, typical: float, high: float) -> Interval:
        """The interval of three numbers."""
        return cls(low=low, typical=typical, high=high)

    def scaled(self, factor: float) -> Interval:
        """The same interval times a non-negative factor."""
        return Interval.of(self.low * factor, self.typical * factor, self.high * factor)

    def times(self, other: Interval) -> Interval:
        """The product of two intervals, end by end."""
        ends = self.low * other.low, self.typical * other.typical, self.high * other.high
        return Interval.of(*ends)


def check_unit(unit: str, dimension: str) -> float:
    """Factor from ``unit`` to the base unit of ``dimension``."""
    table = UNITS[dimension]
    if unit in table:
        return table[unit]
    near = difflib.get_close_matches(unit, table, n=1, cutoff=0.4)
    alike = next((u for u in table if u.lower() == unit.lower()), None)
    guess = alike or (near[0] if near else None)
    mean = f", did you mean {guess}" if guess else ""
    if dimension in ("bytes", "bandwidth") and re.search(r"[Bb]it|bps|^[kMGT]i?b\b", unit):
        # Of bits, only another case is a likely slip, not whichever unit is nearest.
        mean = f", did you mean {alike}: 8 Mbit are 1 MB" if alike else ": 8 Mbit are 1 MB"
    msg = f"{unit[:40]!r} is not a unit of {dimension}{mean}; allowed: {', '.join(table)}"
    raise ValueError(msg)


def in_base_unit(number: str, unit: str, dimension: str, per_base: float = 1.0) -> float:
    """The number nearest to ``number`` units of a dimension, in its base unit."""
    # As people count: 2.01 kB are 2,010 bytes, which binary floating point misses, so that a figure
    # right at its limit would be over it.
    # `per_base`: How many of the units to return make a base unit: 1000 for milliseconds.
    product = _EXACT.create_decimal(number)
    for factor in (check_unit(unit, dimension), per_base):
        product = _EXACT.multiply(product, decimal.Decimal(repr(factor)))
    return float(product)


def parse_quantity(text: str, dimension: str, per_base: float = 1.0) -> float:
    """Read ``"12 MB"`` or ``"12MB"`` into the base unit of ``dimension``."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        example = "MB" if dimension == "bytes" else next(reversed(UNITS[dimension]))
        raise ValueError(f'{text[:40]!r} is not a number with a unit, such as "20 {example}"')
    value = in_base_unit(match[1], match[2], dimension, per_base)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]!r} is not a finite number")
    return value


def _digits(value: float) -> str:
    """Three significant digits without an exponent, e.g. ``8.20``, ``34.2``, ``512``."""
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(float(f"{value:.3g}"))))
    decimals = max(0, 2 - magnitude)
    return f"{value:.{decimals}f}"


def format_bytes(count: float) -> str:
    """Bytes for people: ``512 B``, ``34.2 kB``, ``1.61 GB`` (powers of 1000)."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor * 0.9995:
            return f"{_digits(count / factor)} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float) -> str:
    """Seconds for people: ``850 µs``, ``8.20 ms``, ``42.0 s``, ``12.4 min``, ``3.10 h``."""
    # Below each limit by what would be rounded up to it: 1000 ms are 1.00 s.
    for unit, factor, limit in (("µs", 1e-6, 9.995e-4), ("ms", 1e-3, 0.9995), ("s", 1.0, 120.0)):
        if abs(seconds) < limit:
            return f"{_digits(seconds / factor)} {unit}"
    if abs(seconds) < 7200.0:
        return f"{_digits(seconds / 60.0)} min"
    return f"{_digits(seconds / 3600.0)} h"


def _format_days(days: float) -> str:
    """Days for people: ``8.00 h``, ``5.3 days``."""
    shown = format_number(days)
    if days < 1 and shown != "1":
        return format_duration(days * 86400.0)
    return f"{shown} {'day' if shown == '1' else 'days'}"


def format_energy(joules: float) -> str:
    """Joules for people: ``850 J``, ``12.4 kJ``, ``1.20 MJ``."""
    for unit, factor in (("MJ", 1e6), ("kJ", 1e3)):
        if abs(joules) >= factor * 0.9995:
            return f"{_digits(joules / factor)} {unit}"
    return f"{_digits(joules)} J"


def format_number(value: float) -> str:
    """A plain number for people: at most four significant digits, no exponent in common sizes."""
    return f"{value:.4g}"


def format_percent(share: float) -> str:
    """A share with one decimal, below one percent with two digits: ``16.1 %``, ``0.0057 %``."""
    # What is only nearly all keeps the digits that matter: `99.99 %`, `100.02 %`.
    percent = 100 * share
    if 0 < abs(percent) < 0.995:
        return f"{percent:.2g} %"
    places = 1
    while places < _MOST_PLACES and abs(percent) != 100 and abs(round(percent, places)) == 100:
        places += 1
    return f"{percent:.{places}f} %"


def format_value(value: float, unit: str) -> str:
    """A figure for people, by its unit, one of :data:`odtpack_simulator.values.figure.Unit`."""
    if unit in ("ms", "%"):
        value, unit = (value / 1e3, "s") if unit == "ms" else (value / 100, "share")
    shown = {
        "B": format_bytes,
        "s": format_duration,
        "days": _format_days,
        "J": format_energy,
        "share": format_percent,
        "1": format_number,
    }.get(unit)
    return f"{format_number(value)} {unit}" if shown is None else shown(value)


def format_limit(value: float, unit: str) -> str:
    """A figure somebody chose, without the zeros that would pretend precision: ``60 s``."""
    number, space, shown_unit = format_value(value, unit).partition(" ")
    return f"{float(number):.10g}{space}{shown_unit}"


def format_interval(interval: Interval, unit: str) -> str:
    """Both ends in the unit that suits the high one: ``21.0 to 72.0 ms``, ``1.75 to 3.24 min``."""
    return format_interval_of(interval.low, interval.high, unit)


def format_interval_of(low_end: float, high_end: float, unit: str) -> str:
    """The same of two numbers."""
    low, high = format_value(low_end, unit), format_value(high_end, unit)
    low_number, _, low_unit = low.partition(" ")
    high_unit = high.partition(" ")[2]
    if low_unit == high_unit:
        return f"{low_number} to {high}"
    factor = {"ms": 1e-3, "s": 1.0}.get(unit)
    target = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}.get(high_unit)
    if factor is None or target is None:
        return f"{low} to {high}"
    return f"{_digits(low_end * factor / target)} to {high}"


SourceKind = Literal["measured", "published", "assumed"]


class Strict(Part):
    """Base of everything in a profile: no unknown keys, no coercion, finite numbers."""

    # TOML has types of its own: a number in quotes is a mistake, not a number.
    model_config = ConfigDict(strict=True)


class Quantity(Strict):
    """A known figure: a positive finite value with its unit, how it is known, and from where."""

    value: float = Field(gt=0, le=1e18)
    unit: str = Field(min_length=1, max_length=16)
    kind: SourceKind
    source: str = Field(min_length=3, max_length=1000)
    low: float | None = Field(default=None, gt=0, le=1e18)
    high: float | None = Field(default=None, gt=0, le=1e18)

    @model_validator(mode="after")
    def _ordered(self) -> Quantity:
        if (self.low is None) != (self.high is None):
            raise ValueError("low and high come together or not at all")
        if (
            self.low is not None
            and self.high is not None
            and not self.low <= self.value <= self.high
        ):
            raise ValueError("needs low <= value <= high")
        return self

    def interval(self, dimension: str) -> Interval:
        """The figure in the base unit of ``dimension``; a point where no bounds are given."""
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        ends = (in_base_unit(repr(each), self.unit, dimension) for each in (low, self.value, high))
        return Interval.of(*ends)


class ThreadedQuantity(Quantity):
    """A figure that holds for a number of threads that run at once."""

    threads: int = Field(ge=1, le=1024)


class Unknown(Strict):
    """A figure that is unknown, with the reason; it reads as null."""

    unknown: str = Field(min_length=3, max_length=1000)


def _variant(value: object) -> str:
    is_unknown = "unknown" in value if isinstance(value, dict) else isinstance(value, Unknown)
    return f"{TAG_PREFIX}unknown" if is_unknown else f"{TAG_PREFIX}known"


_UnknownTag = Annotated[Unknown, Tag(f"{TAG_PREFIX}unknown")]
KnownFigure = Annotated[
    Annotated[Quantity, Tag(f"{TAG_PREFIX}known")] | _UnknownTag, Discriminator(_variant)
]
ThreadedFigure = Annotated[
    Annotated[ThreadedQuantity, Tag(f"{TAG_PREFIX}known")] | _UnknownTag, Discriminator(_variant)
]


def _in(dimension: str, at_most: float = math.inf, at_least: float = 1e-18) -> AfterValidator:
    """Validator: the figure's unit is one of the dimension, and nothing overflows for it."""

    def check(figure: Any) -> Any:
        found = bounds(figure, dimension)
        if found is not None and found.high > at_most:
            raise ValueError(f"cannot be more than {at_most:g}, found {found.high:g}")
        if found is not None and found.low < at_least:
            raise ValueError(f"is too small, found {figure.low or figure.value:g} {figure.unit}")
        return figure

    return AfterValidator(check)


def _whole(figure: Any) -> Any:
    if isinstance(figure, Quantity) and not figure.value.is_integer():
        raise ValueError(f"must be a whole number, found {figure.value:g}")
    return figure


Bytes = Annotated[KnownFigure, _in("bytes", at_least=1)]
Bandwidth = Annotated[KnownFigure, _in("bandwidth")]
Frequency = Annotated[KnownFigure, _in("frequency")]
Count = Annotated[KnownFigure, _in("count", at_most=1024), AfterValidator(_whole)]
Duration = Annotated[KnownFigure, _in("duration")]
Power = Annotated[KnownFigure, _in("power")]
Energy = Annotated[KnownFigure, _in("energy")]
Ratio = Annotated[KnownFigure, _in("ratio")]
Fraction = Annotated[KnownFigure, _in("ratio", at_most=1.0)]
Rate = Annotated[KnownFigure, _in("compute")]
"""A processor rate that needs no number of threads."""
Compute = Annotated[ThreadedFigure, _in("compute")]


def bounds(figure: Quantity | Unknown | None, dimension: str) -> Interval | None:
    """The figure in the base unit of ``dimension``; None where it is unknown."""
    return figure.interval(dimension) if isinstance(figure, Quantity) else None
