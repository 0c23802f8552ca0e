"""The table of error codes: what each means, the usual hint, and where it is explained."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """An entry of the table."""

    means: str  # one sentence that says what is wrong, whatever the culprit
    # The usual next thing to do, which the error's message shows; None if it depends on the case.
    hint: str | None = None
    fix: str | None = None  # what to do in general, where there is no hint
    cause: str | None = None  # what usually causes the error, where `means` does not say it
    example: str | None = None  # lines to paste that help, or that are right
    kits: bool = False  # whether the training kits of other languages raise the code too

    @property
    def advice(self) -> str:
        """What to do: the hint, or what helps in general."""
        return self.hint or self.fix or ""


@functools.cache
def error_codes() -> dict[str, ErrorCode]:
    """Return every code, in alphabetical order."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return {code: ErrorCode(**entry) for code, entry in table.items()}
