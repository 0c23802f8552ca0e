"""Types of values in a recipe: numbers with their range, in the schema and in messages."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, StrictBool
from pydantic_core import CoreSchema, core_schema

from odtpack.option import Bounds
from odtpack_simulator.values.part import Part

Switch = StrictBool


class Table(Part):
    """The base of all tables of a recipe: no other keys, no other types."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Range(Bounds):
    """The numbers that a key takes, for pydantic and in the schema."""

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

    def _read(self, value: Any) -> Any:
        if not self.hold(value):
            msg = f"must be {self}, found {str(value)[:40]!r}"
            raise ValueError(msg)
        return value


Count = Annotated[int, Range(whole=True, least=0)]
PositiveCount = Annotated[int, Range(whole=True, least=1)]
Whole = Annotated[int, Range(whole=True)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
