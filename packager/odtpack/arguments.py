"""Arguments of the functions that users call: one of a wrong type is an error that names it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from odtpack.errors import OdtpackError


def check_type(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    """Check the type of an argument; a bool is not an int.

    Args:
        name: The argument.
        value: Its value.
        kinds: What it may be.
        example: What to write, for the error.

    Raises:
        OdtpackError: ``bad-argument``.
    """
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        shown = repr(value)
        raise OdtpackError(
            "bad-argument",
            f"{name} cannot be {shown if len(shown) <= 60 else type(value).__name__}",
            hint=f"pass for example: {name}={example}",
        )


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Check that an argument is one of the values that it may have.

    Raises:
        OdtpackError: ``bad-argument``.
    """
    known = tuple(choices)
    if not isinstance(value, str | None) or value not in known:
        raise OdtpackError(
            "bad-argument",
            f"{name} cannot be {repr(value)[:60]}",
            hint=f"pass one of {', '.join(map(repr, known))}",
        )


def check_names(name: str, value: object) -> None:
    """Check that an argument is a list of texts, and not one text, whose letters would be taken.

    Raises:
        OdtpackError: ``bad-argument``.
    """
    example = f"[{value!r}]" if isinstance(value, str) else "['name']"
    check_type(name, None if isinstance(value, str | bytes) else value, Collection, example)
    for each in value:  # type: ignore[attr-defined] # a collection
        check_type(name, each, str, "['name']")
