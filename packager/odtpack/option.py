"""Options: each declared once, as a field of a frozen dataclass.

:class:`odtpack.spec.BuildSpec`, the losses and the optimizers declare theirs with :func:`option`.
The check of a value, the option of the command line, the key of a recipe, the schemas and the
tables of the documentation follow from the declaration. This module imports nothing large.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from types import NoneType
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LARGEST = 2**63 - 1

REQUIRED: Final[Any] = dataclasses.MISSING
"""The default of an option that has none."""

LARGEST_FLOAT: Final = (2 - 2**-23) * 2.0**127
"""The largest number that float32 holds."""


def is_too_large(value: object) -> bool:
    """Whether a finite number becomes infinite in a model."""
    return isinstance(value, float) and math.isfinite(value) and abs(value) > LARGEST_FLOAT


BOUNDS: Final = (
    ("least", "minimum", "{:.12g} or more", operator.ge),
    ("above", "exclusiveMinimum", "above {:.12g}", operator.gt),
    ("most", "maximum", "at most {:.12g}", operator.le),
    ("below", "exclusiveMaximum", "below {:.12g}", operator.lt),
)
"""Bound of an option, its name in JSON Schema, its text, and how values compare with it."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The numbers that an option takes: whole ones, or any finite ones."""

    # Whole numbers only, that INT64 holds. Otherwise one may be written without a fraction.
    whole: bool = False
    least: float | None = None  # bound that is allowed itself
    above: float | None = None  # bound that is not
    most: float | None = None  # bound that is allowed itself
    below: float | None = None  # bound that is not

    def hold(self, value: object) -> bool:
        """Whether a value is such a number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(value, int):
            good = abs(value) <= _LARGEST
        else:
            # Values go to the models as float32: none is infinite there.
            good = not self.whole and abs(value) <= LARGEST_FLOAT
        limits = ((getattr(self, name), holds) for name, _, _, holds in BOUNDS)
        return good and all(limit is None or holds(value, limit) for limit, holds in limits)

    def __str__(self) -> str:
        """The range for people."""
        found = ((text, getattr(self, name)) for name, _, text, _ in BOUNDS)
        words = [text.format(bound) for text, bound in found if bound is not None]
        what = "a whole number" if self.whole else "a number"
        return ", ".join(filter(None, (what, " and ".join(words))))


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a class."""

    name: str  # its name: the argument in Python
    # `float`, `int`, `bool`, `str`, `Literal[...]`, `tuple[str, ...]`, an array, or another class
    type: Any
    default: Any  # its default; None if it may be left out, REQUIRED if not
    meaning: str  # A sentence for people; Markdown
    bounds: Bounds  # range of a number, or of the numbers of an array
    axes: int | None = None  # number of axes of an array; 0 for any, None if it is not an array
    key: str = ""  # its key in a recipe, below its tables: `"formats.nominal"`
    flag: str = ""  # its option on the command line; empty if several make it, or none
    metavar: str | None = None  # what stands for its value on the command line
    example: Any = None  # A value, for messages
    # raises `ValueError` for a text that is none of its values
    check: Callable[[str], object] | None = None
    # makes a value of a text, where the text is not the value
    parse: Callable[[str], Any] | None = None
    # makes the value of what a recipe has there, where that is not the value
    read: Callable[[Any], Any] | None = None
    manifest: str = ""  # the field of a package's manifest that records it
    code: str = "bad-argument"  # error code of a value out of range

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that there are, if they are few."""
        if self.type is bool:
            return (True, False)
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def many(self) -> bool:
        """Whether it may be repeated."""
        return get_origin(self.type) is tuple and self.axes is None

    @property
    def is_number(self) -> bool:
        """Whether it takes one number."""
        return self.axes is None and self.type in (int, float)

    def takes(self, value: object) -> bool:
        """Whether a value is allowed; arrays are for their class to check."""
        if value is None or self.axes is not None:
            return self.axes is not None or self.default is None
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        if self.is_number:
            return self.bounds.hold(value)
        if not self.has_type(value):
            return False
        if self.check is not None:
            try:
                self.check(value)  # type: ignore[arg-type] # a text
            except ValueError:
                return False
        return True

    def has_type(self, value: object) -> bool:
        """Whether a value is of the type, whatever its range."""
        if value is None:
            return self.default is None
        if self.choices:
            return self.takes(value)
        if self.is_number:
            number = int if self.bounds.whole else int | float
            return isinstance(value, number) and not isinstance(value, bool)
        if self.many:
            item = str if get_args(self.type)[0] is str else object
            listed = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
            return listed and all(isinstance(each, item) for each in value)  # type: ignore[attr-defined]
        kind = get_origin(self.type) or self.type
        return kind is Any or isinstance(value, kind)

    @property
    def range(self) -> str:
        """What it takes, for people: ``a number, above 0``."""
        if self.choices:
            return " or ".join(repr(choice) for choice in self.choices)
        if self.axes is None:
            return str(self.bounds)
        lowest = "" if self.bounds.least is None else f", {self.bounds.least:g} or more"
        return f"{'a list of numbers' if self.axes == 1 else 'numbers'}{lowest}"

    @property
    def help(self) -> str:
        """Its help text on the command line."""
        text = self.meaning.replace("`", "")
        if self.many:
            text += " May be repeated."
        if any(self.default is nothing for nothing in (None, (), False, REQUIRED)):
            return text
        shown = f"{self.default:g}" if isinstance(self.default, float) else self.default
        shown = "on" if self.default is True else shown
        return f"{text}  [default: {shown}]"


def option(
    default: T,
    meaning: str,
    *,
    whole: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    **more: Any,
) -> T:
    """Declare an option as a field of a dataclass."""
    metadata = {"meaning": meaning, "bounds": Bounds(whole, least, above, most, below), **more}
    make: Callable[..., Any] = dataclasses.field
    if isinstance(default, dict):
        field: T = make(default_factory=dict, metadata=metadata)
    else:
        field = make(default=default, metadata=metadata)
    return field


def also(kind: type, name: str) -> Any:
    """Declare a field as another class declares one of its own."""
    (found,) = (field for field in dataclasses.fields(kind) if field.name == name)
    return dataclasses.field(default=found.default, metadata=found.metadata)


def options_of(kind: type) -> tuple[Option, ...]:
    """The options of a dataclass, in their order."""
    if kind in _KNOWN:
        return _KNOWN[kind]
    hints = {field.name: field.type for field in dataclasses.fields(kind)}
    if any(isinstance(hint, str) for hint in hints.values()):
        hints = get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        if "meaning" not in field.metadata:
            msg = f"{kind.__name__}.{field.name} is not declared by option(default, meaning)"
            raise TypeError(msg)
        parts = [part for part in get_args(hints[field.name]) if part is not NoneType]
        plain = parts[0] if NoneType in get_args(hints[field.name]) else hints[field.name]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found.append(Option(field.name, plain, default, **field.metadata))
    return _KNOWN.setdefault(kind, tuple(found))


_KNOWN: dict[type, tuple[Option, ...]] = {}


def check_options(given: Any) -> None:
    """Check the fields of a dataclass, and make tuples of lists."""
    from odtpack.errors import OdtpackError

    for each in options_of(type(given)):
        value = getattr(given, each.name)
        good, problem = each.has_type(value), None
        if good and value is not None and each.check is not None:
            try:
                each.check(value)
            except ValueError as error:
                problem = f"{each.name} {error}"
        elif good and not each.takes(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            problem = f"{each.name} is {shown}; it must be {each.range}"
        if not good:
            shown = repr(value)
            problem = f"{each.name} cannot be {shown if len(shown) <= 60 else type(value).__name__}"
        if problem is not None:
            example = each.example
            if each.many:
                example = [value if isinstance(value, str) else example or "name"]
            elif each.choices:
                example = each.choices[0]
            elif example is None:
                example = each.default
            flag = f" ({each.flag.split('/')[0]} on the command line)" if each.flag else ""
            hint = f"pass for example: {each.name}={example!r}{flag}"
            raise OdtpackError(each.code if good else "bad-argument", problem, hint=hint)
        if each.many and not isinstance(value, tuple):
            object.__setattr__(given, each.name, tuple(value))


def parse_value(text: str) -> object:
    """Read a value as people type it: ``true``, ``-100``, ``0.1``, ``0.2,0.8`` or a word."""
    if "," in text:
        return tuple(_number(part) for part in text.split(",") if part.strip())
    return {"true": True, "false": False}.get(text, _number(text))


def _number(text: str) -> object:
    if re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
