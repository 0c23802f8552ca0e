"""Options of losses: read from text, checked, and made comparable."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from odtpack.errors import OdtpackError

Numbers = float | tuple["Numbers", ...]
"""A number, or numbers nested as an array is: hashable and comparable, unlike an array."""


def parse(text: str) -> object:
    """Read a value as people type it: ``true``, ``-100``, ``0.1``, ``0.2,0.8`` or a word."""
    if "," in text:
        return tuple(_number(part) for part in text.split(",") if part.strip())
    return {"true": True, "false": False}.get(text, _number(text))


def _number(text: str) -> object:
    if re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def same_type(value: object, usual: object) -> object:
    """A whole number where the default is one with a fraction: ``margin=1`` is 1.0."""
    if isinstance(usual, float) and type(value) is int:
        return float(value)
    return value


def bad_option(loss: str, option: str, value: object, must: str) -> OdtpackError:
    """The error for a value that an option does not take."""
    shown = repr(value)
    return OdtpackError(
        "bad-loss-option",
        f"option {option} of {loss} is {shown[:60]}{'...' * (len(shown) > 60)}; it must be {must}",
    )


def check_choice(loss: str, option: str, value: object, choices: Sequence[object]) -> None:
    """Check that a value is one of a few.

    Raises:
        OdtpackError: It is not.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        must = " or ".join(repr(choice) for choice in choices)
        raise bad_option(loss, option, value, must)


def check_number(
    loss: str,
    option: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> None:
    """Check that a value is a finite number within bounds.

    Raises:
        OdtpackError: It is not.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if good and math.isfinite(value) and above < value < below and at_least <= value <= at_most:  # type: ignore[arg-type, operator]
        return
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (
            ("above", above),
            ("at least", at_least),
            ("below", below),
            ("at most", at_most),
        )
        if math.isfinite(bound)
    ]
    raise bad_option(loss, option, value, " ".join(["a number", " and ".join(bounds)]).strip())


def check_whole(loss: str, option: str, value: object) -> None:
    """Check that a value is a whole number that INT64 holds.

    Raises:
        OdtpackError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise bad_option(loss, option, value, "a whole number")


def numbers(loss: str, option: str, value: Any, *, rank: int | None = None) -> Numbers:
    """Return an array, list or number as nested tuples.

    Args:
        loss: Name of the loss.
        option: Name of the option.
        value: What was given.
        rank: Number of axes that it must have; any if None.

    Raises:
        OdtpackError: It is not an array of finite numbers that are 0 or more.
    """
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array([-1.0])
    wanted = {None: "numbers, 0 or more", 1: "a list of numbers, 0 or more"}[rank]
    if (rank is not None and array.ndim != rank) or array.size == 0:
        raise bad_option(loss, option, value, wanted)
    if not np.isfinite(array).all() or (array < 0).any():
        raise bad_option(loss, option, value, wanted)
    nested: Numbers = _nest(array.tolist())
    return nested


def _nest(value: Any) -> Any:
    return tuple(_nest(part) for part in value) if isinstance(value, list) else value


def plain(value: object) -> object:
    """The value as JSON has it: lists for tuples."""
    return [plain(part) for part in value] if isinstance(value, tuple) else value
