"""The kinds of values that the parts of a manifest are made of."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import numpy as np

from odtpack_runtime.files.records import WHOLE_MAX, InvalidRecordError, Path, Rule

Name = Annotated[str, Rule(minLength=1)]
Kind = Annotated[str, Rule(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
"""Name of a loss or an optimizer: a builder may have more of them."""
SHA256 = Annotated[str, Rule(pattern=r"^[0-9a-f]{64}$")]
DType = Literal[
    "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool", "string",
]  # fmt: skip
NonNegativeInt = Annotated[int, Rule(minimum=0, maximum=WHOLE_MAX)]
PositiveInt = Annotated[int, Rule(minimum=1, maximum=WHOLE_MAX)]

MAX_RANK = 32
MAX_ELEMENTS = 2**40


class ShapeRule(Rule):
    """Bounds of a shape: its rank, and the product of its fixed sizes.

    Args:
        elements: The largest product.
    """

    def __init__(self, elements: int = MAX_ELEMENTS) -> None:
        super().__init__(maxItems=MAX_RANK)
        self._elements = elements

    def check(self, value: Any, path: Path) -> None:
        """Check a shape.

        Raises:
            InvalidRecordError: Its rank or its product is too large.
        """
        super().check(value, path)
        # A size of 0 makes no other one harmless: readers multiply in their own order.
        if math.prod(max(size, 1) for size in value if isinstance(size, int)) > self._elements:
            raise InvalidRecordError(f"it must have {self._elements} elements or fewer", path)


class Float32Rule(Rule):
    """A number above 0 that is also a float32 above 0, as the optimizer takes it."""

    def __init__(self) -> None:
        super().__init__(exclusiveMinimum=0)

    def check(self, value: Any, path: Path) -> None:
        """Check a number.

        Raises:
            InvalidRecordError: As a float32 it is infinite, 0 or less.
        """
        with np.errstate(all="ignore"):
            if not 0 < np.float32(value) < np.inf:
                raise InvalidRecordError("it must be a finite float32 above 0", path)


Shape = Annotated[tuple[NonNegativeInt | Name | None, ...], ShapeRule()]
FixedShape = Annotated[tuple[NonNegativeInt, ...], ShapeRule()]
Rate = Annotated[float, Float32Rule()]
"""A learning rate, or what one is multiplied by."""
