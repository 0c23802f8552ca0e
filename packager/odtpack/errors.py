"""Errors of the packager; the base class lives in the runtime, which imports nothing from here."""

from odtpack_runtime.errors import OdtpackError, UnknownNameError, WrongTypeError

__all__ = ["OdtpackError", "UnknownNameError", "WrongTypeError"]
