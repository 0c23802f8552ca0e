"""Tables whose ``kind`` says which keys they have."""

from __future__ import annotations

from typing import Any

from odtpack_simulator.values.schema_errors import TAG_PREFIX


def by_kind(value: Any) -> str | None:
    """The tag of a table; None if it is none, or has no kind."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return f"{TAG_PREFIX}{kind}" if isinstance(kind, str) else None
