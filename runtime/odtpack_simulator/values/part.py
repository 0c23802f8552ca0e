"""The base of all that pydantic checks."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A record: no unknown keys, finite numbers, never changed in place."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def to_json(self) -> str:
        """The record as JSON text in the order of the fields; the same record, the same bytes."""
        content = self.model_dump(mode="json")
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
