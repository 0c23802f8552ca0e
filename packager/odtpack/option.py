"""Options of losses and optimizers: declared once, as the fields of a frozen dataclass.

The declaration holds default, meaning and range. The check of a value, the table of a recipe,
the schema of the manifest and the pages of the documentation follow from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LARGEST = 2**63 - 1


LARGEST_FLOAT: Final = (2 - 2**-23) * 2.0**127
"""The largest number that float32 holds."""


def is_too_large(value: object) -> bool:
    """Whether a finite number becomes infinite in a model."""
    return isinstance(value, float) and math.isfinite(value) and abs(value) > LARGEST_FLOAT


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The numbers that an option takes: whole ones, or any finite ones.

    Attributes:
        whole: Whole numbers only, that INT64 holds. Otherwise one may be written without a
            fraction.
        least: Bound that is allowed itself.
        above: Bound that is not.
        most: Bound that is allowed itself.
        below: Bound that is not.
    """

    whole: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def hold(self, value: object) -> bool:
        """Whether a value is such a number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(value, int):
            good = abs(value) <= _LARGEST
        else:
            # Values go to the models as float32: none is infinite there.
            good = not self.whole and abs(value) <= LARGEST_FLOAT
        return (
            good
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """The range for people."""
        words = [
            text.format(bound)
            for bound, text in (
                (self.least, "{:g} or more"),
                (self.above, "above {:g}"),
                (self.most, "at most {:g}"),
                (self.below, "below {:g}"),
            )
            if bound is not None
        ]
        what = "a whole number" if self.whole else "a number"
        return ", ".join(filter(None, (what, " and ".join(words))))


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a class.

    Attributes:
        name: Its name.
        type: ``float``, ``int``, ``bool``, ``str``, ``Literal[...]`` or an array.
        default: Its default; None if it may be left out.
        meaning: A sentence for people.
        bounds: Range of a number, or of the numbers of an array.
        axes: Number of axes of an array; 0 for any, None if it is not an array.
    """

    name: str
    type: Any
    default: Any
    meaning: str
    bounds: Bounds
    axes: int | None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that there are, if they are few."""
        if self.type is bool:
            return (True, False)
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def takes(self, value: object) -> bool:
        """Whether a value is allowed; arrays are for their class to check."""
        if value is None or self.axes is not None:
            return self.axes is not None or self.default is None
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        return self.bounds.hold(value)

    @property
    def range(self) -> str:
        """What it takes, for people: ``a number, above 0``."""
        if self.choices:
            return " or ".join(repr(choice) for choice in self.choices)
        if self.axes is None:
            return str(self.bounds)
        lowest = "" if self.bounds.least is None else f", {self.bounds.least:g} or more"
        return f"{'a list of numbers' if self.axes == 1 else 'numbers'}{lowest}"


def option(
    default: T,
    meaning: str,
    *,
    whole: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    axes: int | None = None,
) -> T:
    """Declare an option as a field of a dataclass.

    Args:
        default: Its default.
        meaning: A sentence for people; Markdown.
        whole: See :class:`Bounds`, as for the four bounds.
        least: Smallest number.
        above: Number that all are above.
        most: Largest number.
        below: Number that all are below.
        axes: Number of axes of an array; 0 for any. Without it, it is not an array.

    Returns:
        The field, which a type checker sees as its default.
    """
    bounds = Bounds(whole, least, above, most, below)
    metadata = {"meaning": meaning, "bounds": bounds, "axes": axes}
    make: Callable[..., Any] = dataclasses.field
    field: T = make(default=default, metadata=metadata)
    return field


@functools.cache
def options_of(kind: type) -> tuple[Option, ...]:
    """The options of a dataclass, in their order.

    Raises:
        TypeError: A field is not declared by :func:`option`.
    """
    hints = get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        if "meaning" not in field.metadata:
            msg = f"{kind.__name__}.{field.name} is not declared by option(default, meaning)"
            raise TypeError(msg)
        parts = [part for part in get_args(hints[field.name]) if part is not type(None)]
        plain = parts[0] if type(None) in get_args(hints[field.name]) else hints[field.name]
        found.append(Option(field.name, plain, field.default, **field.metadata))
    return tuple(found)
