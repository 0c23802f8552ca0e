"""The table of error codes: what each means, the usual hint, and where it is explained."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """An entry of the table.

    Attributes:
        means: One sentence that says what is wrong, whatever the culprit.
        hint: The usual next thing to do; None if it depends on the culprit.
        kits: Whether the training kits of other languages raise the code too.
    """

    means: str
    hint: str | None = None
    kits: bool = False


@functools.cache
def error_codes() -> dict[str, ErrorCode]:
    """Return every code, in alphabetical order."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return {code: ErrorCode(**entry) for code, entry in table.items()}
