"""The figure of a device profile: a value with unit, kind and source, or an honest unknown."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from odtpack_simulator.values.part import TAG_PREFIX, Part
from odtpack_simulator.values.units import Interval, in_base_unit

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
            msg = "low and high come together or not at all"
            raise ValueError(msg)
        if (
            self.low is not None
            and self.high is not None
            and not self.low <= self.value <= self.high
        ):
            msg = "needs low <= value <= high"
            raise ValueError(msg)
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


def _in(dimension: str, at_most: float = math.inf) -> AfterValidator:
    """Validator: the figure's unit is one of the dimension."""

    def check(figure: Any) -> Any:
        if isinstance(figure, Quantity) and (high := figure.interval(dimension).high) > at_most:
            msg = f"cannot be more than {at_most:g}, found {high:g}"
            raise ValueError(msg)
        return figure

    return AfterValidator(check)


def _whole(figure: Any) -> Any:
    if isinstance(figure, Quantity) and not figure.value.is_integer():
        msg = f"must be a whole number, found {figure.value:g}"
        raise ValueError(msg)
    return figure


Bytes = Annotated[KnownFigure, _in("bytes")]
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
