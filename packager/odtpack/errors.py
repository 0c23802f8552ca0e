"""Errors of the packager; the base class lives in the runtime, which imports nothing from here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from odtpack_runtime.errors import OdtpackError, UnknownNameError, WrongTypeError, quoted

__all__ = ["OdtpackError", "UnknownNameError", "WrongTypeError", "quoted"]

_MOST_SHOWN = 200


def shortened(text: str) -> str:
    """The text, or both its ends where it is too long for a message."""
    half = _MOST_SHOWN // 2
    return text if len(text) <= _MOST_SHOWN else f"{text[:half]}...{text[-half:]}"


def near_names(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.5) -> str:
    """The hint that names what is close to a misspelt name, or another one where nothing is."""
    import difflib

    names, name = {each.lower(): each for each in known}, name.lower()
    near = difflib.get_close_matches(name, names, n=3, cutoff=cutoff)
    near.sort(key=lambda each: not each.startswith(name))
    return f"did you mean {', '.join(names[each] for each in near)}?" if near else otherwise


def some(names: Sequence[str], most: int = 4) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if names[most:] else ""
    return f"{', '.join(names[:most])}{more}"


def system_refused(error: OSError) -> OdtpackError:
    """Return the error for what the system refused where nothing says better what it was for."""
    reason = error.strerror or str(error)
    if error.filename is None:
        return OdtpackError("system-refused", f"the system refused to write or read: {reason}")
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "a file"
    return OdtpackError("system-refused", f"the system refused {shortened(name)!r}: {reason}")


@contextmanager
def located(where: str | None) -> Iterator[None]:
    """Let errors say where their culprit is, unless they say so already."""
    try:
        yield
    except OdtpackError as error:
        error.where = error.where or where
        raise


def model_not_readable(path: Path, error: OSError) -> OdtpackError:
    """Return the error for a model that the system does not let read."""
    what = f"{str(path)!r} cannot be read: {error.strerror or error}"
    return OdtpackError("model-not-readable", what, hint="check its permissions")


def not_onnx(path: Path) -> OdtpackError:
    """Return the error for a file that is not an ONNX model."""
    return OdtpackError("not-onnx", f"{str(path)!r} is not an ONNX model")


# Arguments of the functions that users call: one of a wrong type is an error that names it.


def check_type(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    """Check the type of an argument; a bool is not an int."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        shown = repr(value)
        what = f"{name} cannot be {shown if len(shown) <= 60 else type(value).__name__}"
        raise OdtpackError("bad-argument", what, hint=f"pass for example: {name}={example}")
