"""The kinds of values that the parts of a manifest are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from odtpack_runtime.files.records import Rule

Name = Annotated[str, Rule(minLength=1)]
Kind = Annotated[str, Rule(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
"""Name of a loss or an optimizer: a builder may have more of them."""
SHA256 = Annotated[str, Rule(pattern=r"^[0-9a-f]{64}$")]
DType = Literal[
    "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool", "string",
]  # fmt: skip
_INT64_MAX = 2**63 - 1
NonNegativeInt = Annotated[int, Rule(minimum=0, maximum=_INT64_MAX)]
PositiveInt = Annotated[int, Rule(minimum=1, maximum=_INT64_MAX)]
MAX_RANK = 32
Shape = Annotated[tuple[NonNegativeInt | Name | None, ...], Rule(maxItems=MAX_RANK)]
FixedShape = Annotated[tuple[NonNegativeInt, ...], Rule(maxItems=MAX_RANK)]
