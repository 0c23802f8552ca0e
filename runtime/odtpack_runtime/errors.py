"""The one kind of error that odtpack shows to a person, and the table of its codes."""

from __future__ import annotations

import functools
import os
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
    table = tomllib.loads(Path(__file__).with_name("error_codes.toml").read_text("utf-8"))
    return {code: ErrorCode(**entry) for code, entry in table.items()}


def quoted(name: str) -> str:
    """A name from a model or a package as one word of a shell, for what a person will paste."""
    # Always in quotes, unlike shlex.quote: by them odtpack.model.loading finds names in hints.
    return "'" + name.replace("'", "'\"'\"'") + "'"


class OdtpackError(RuntimeError):
    """Bad input or usage, explained to the person who can correct it.

    Every command prints it as three short lines and exits with code 2; the
    Python API raises it. It is a ``RuntimeError`` because that is what the
    reference API raises for the same mistakes.

    Attributes:
        code: Stable kebab-case identifier from ``error_codes.toml``, explained by
            ``odtpack explain CODE``, for example ``"checkpoint-corrupt"``.
        what: One sentence that says what is wrong and names the culprit.
        where: File, graph or key in which the culprit stands.
        hint: The next thing to do, if possible a command or line to paste. Without one, the
            usual hint of the code.
    """

    def __init__(
        self, code: str, what: str, *, where: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.where = where
        if hint is None and code in error_codes():
            hint = error_codes()[code].hint
        self.hint = hint

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f"\n  in: {self.where}"
        if self.hint:
            text += f"\n  help: {self.hint}"
        return text


class UnknownNameError(OdtpackError, LookupError):
    """A name that does not exist, where the reference raises a ``LookupError``."""


class UnknownKeyError(UnknownNameError, KeyError):
    """A key that a mapping does not hold, where the reference raises a ``KeyError``."""


class WrongTypeError(OdtpackError, TypeError):
    """A value of a kind that cannot be taken, where the reference raises a ``TypeError``."""


def unreadable(
    code: str, path: str | os.PathLike[str], error: OSError, hint: str | None = None
) -> OdtpackError:
    """Return the error for a file that the system does not let one read."""
    what = f"{path} cannot be read: {error.strerror or error}."
    return OdtpackError(code, what, where=str(path), hint=hint)


_ALLOCATION_FAILED = (
    "bad_alloc",
    "bad allocation",
    "failed to allocate",
    "cannot allocate memory",
    "std::length_error",
)
"""How ONNX Runtime, C++ and the system word that memory was refused, in lower case."""


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, says that memory was refused."""
    while error is not None:
        if isinstance(error, MemoryError) or says_refused(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def says_refused(text: str) -> bool:
    """Whether a message says that memory was refused."""
    return any(words in text.lower() for words in _ALLOCATION_FAILED)


def too_large(limit: int) -> OdtpackError:
    """Return the error for models that take more memory than they are given."""
    what = f"A step on the models takes more than {limit / 2**30:.3g} GiB of memory."
    return OdtpackError("models-memory", what)
