"""What the parts of a manifest are made of: the base of each, and the kinds of its values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(min_length=1)]
SHA256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DType = Literal[
    "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool", "string",
]  # fmt: skip
_INT64_MAX = 2**63 - 1
NonNegativeInt = Annotated[int, Field(ge=0, le=_INT64_MAX)]
PositiveInt = Annotated[int, Field(ge=1, le=_INT64_MAX)]
MAX_RANK = 32
Shape = Annotated[tuple[NonNegativeInt | Name | None, ...], Field(max_length=MAX_RANK)]


class Part(BaseModel):
    """A record of a manifest: no unknown keys or other types, finite numbers, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
