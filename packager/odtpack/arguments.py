"""Arguments of the functions that users call: one of a wrong type is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from odtpack.errors import OdtpackError


def check_type(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    """Check the type of an argument; a bool is not an int."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        shown = repr(value)
        raise OdtpackError(
            "bad-argument",
            f"{name} cannot be {shown if len(shown) <= 60 else type(value).__name__}",
            hint=f"pass for example: {name}={example}",
        )


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Check that an argument is one of the values that it may have."""
    known = tuple(choices)
    if not isinstance(value, str | None) or value not in known:
        raise OdtpackError(
            "bad-argument",
            f"{name} cannot be {repr(value)[:60]}",
            hint=f"pass one of {', '.join(map(repr, known))}",
        )
