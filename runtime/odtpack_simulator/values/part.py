"""The base of all that pydantic checks."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A record: no unknown keys, finite numbers, never changed in place."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
