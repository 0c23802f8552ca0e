"""Types of values in a recipe: numbers with their range, in the schema and in messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, StrictBool
from pydantic_core import CoreSchema, core_schema

from odtpack_simulator.values.part import Part

_LARGEST = 2**63 - 1

Switch = StrictBool


class Table(Part):
    """The base of all tables of a recipe: no other keys, no other types."""

    model_config = ConfigDict(use_attribute_docstrings=True)


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a key takes: whole ones, or any finite ones.

    Attributes:
        whole: Whole numbers only. Otherwise one may be written without a fraction.
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

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check a value before pydantic converts it."""
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The range, as JSON Schema names it."""
        names = {
            "minimum": self.least,
            "exclusiveMinimum": self.above,
            "maximum": self.most,
            "exclusiveMaximum": self.below,
        }
        return {**handler(schema), **{key: v for key, v in names.items() if v is not None}}

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

    def _read(self, value: Any) -> Any:
        good = (type(value) is int and abs(value) <= _LARGEST) or (
            type(value) is float and not self.whole and math.isfinite(value)
        )
        tests: tuple[tuple[float | None, Callable[[float], bool]], ...] = (
            (self.least, lambda bound: bool(value >= bound)),
            (self.above, lambda bound: bool(value > bound)),
            (self.most, lambda bound: bool(value <= bound)),
            (self.below, lambda bound: bool(value < bound)),
        )
        if not good or not all(bound is None or test(bound) for bound, test in tests):
            msg = f"must be {self}, found {str(value)[:40]!r}"
            raise ValueError(msg)
        return value


Count = Annotated[int, Range(whole=True, least=0)]
PositiveCount = Annotated[int, Range(whole=True, least=1)]
Whole = Annotated[int, Range(whole=True)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
