"""Errors of the packager; the base class lives in the runtime, which imports nothing from here."""

from __future__ import annotations

from pathlib import Path

from odtpack_runtime.errors import OdtpackError, UnknownNameError, WrongTypeError

__all__ = [
    "OdtpackError",
    "UnknownNameError",
    "WrongTypeError",
    "model_not_readable",
    "not_onnx",
]


def model_not_readable(path: Path, error: OSError) -> OdtpackError:
    """Return the error for a model that the system does not let read."""
    return OdtpackError(
        "model-not-readable",
        f"{str(path)!r} cannot be read: {error.strerror or error}",
        hint="check its permissions",
    )


def not_onnx(path: Path) -> OdtpackError:
    """Return the error for a file that is not an ONNX model."""
    return OdtpackError("not-onnx", f"{str(path)!r} is not an ONNX model")
