"""Options of losses: read from text, and made comparable."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from odtpack.errors import OdtpackError
from odtpack.option import Option

Numbers = float | tuple[Any, ...]
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
        hint="docs/losses.md lists the options of every loss",
    )


def numbers(loss: str, option: Option, value: Any) -> Numbers:
    """Return an array, list or number as nested tuples.

    Args:
        loss: Name of the loss.
        option: The option, which is an array.
        value: What was given.

    Raises:
        OdtpackError: It is not an array of finite numbers that the option takes.
    """
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array([])
    if (option.axes and array.ndim != option.axes) or array.size == 0:
        raise bad_option(loss, option.name, value, option.range)
    if not all(option.bounds.hold(number) for number in array.ravel().tolist()):
        raise bad_option(loss, option.name, value, option.range)
    nested: Numbers = _nest(array.tolist())
    return nested


def _nest(value: Any) -> Any:
    return tuple(_nest(part) for part in value) if isinstance(value, list) else value


def plain(value: object) -> object:
    """The value as JSON has it: lists for tuples."""
    return [plain(part) for part in value] if isinstance(value, tuple) else value
