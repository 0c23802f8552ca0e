"""What the parts of a result are made of: the base of each record and its kinds of numbers."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator, Field

from odtpack_simulator.values.part import Part


def _finite_or_null(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Bytes = Annotated[int, Field(ge=0, le=2**62)]
Count = Annotated[int, Field(ge=0, le=2**62)]
NonNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(max_length=4000)]
Loss = Annotated[float | None, BeforeValidator(_finite_or_null)]
"""A loss; null where it was NaN or infinite."""


class NotJudged(Part):
    """A figure that is null, and why."""

    figure: Text
    reason: Text


class Origin(Part):
    """When a result was made (UTC, ISO 8601), and from which commit; null where unknown."""

    commit: str | None = Field(default=None, pattern="^[0-9a-f]{7,64}$")
    date: str | None = Field(default=None, max_length=40)
