"""Registers the library of native kernels with sessions whose models can use it."""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import onnxruntime

from odtpack_runtime.errors import OdtpackError

DOMAIN: Final = "odtpack.native"
"""Of the functions that the library has kernels for."""

VARIABLE: Final = "ODTPACK_NATIVE"
"""Environment variable: the file of the library, or ``0`` to do without it."""

ENTRY: Final = DOMAIN
"""Session option: ``0`` to do without the library; ``1`` once it is registered."""

COUNTS: Final = "odtpack.native.operators"
"""Session option: how many operators of each kind the library registers, of which a session keeps
some kilobytes each; without it all."""

_KINDS: Final = ("Kernel", "Codes", "SignedCodes")
"""Operators of the domain, which are numbered from 0."""


def native_library() -> Path | None:
    """The library of native kernels that :data:`VARIABLE` names, or an installed one; or None."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return _installed()
    return None if wanted in ("", "0") else Path(wanted)


@functools.cache
def _installed() -> Path | None:
    """The library of the distribution ``odtpack-native``, which an extra brings."""
    try:
        return Path(importlib.import_module("odtpack_native").LIBRARY)
    except ImportError:
        return None


def count_operators(operators: Mapping[str, Mapping[str, Mapping[str, int]]]) -> tuple[int, ...]:
    """How many operators of each kind the models of a package need, by what its manifest lists."""
    names = {name for domains in operators.values() for name in domains.get(DOMAIN, ())}
    found = [re.fullmatch(r"([A-Za-z]+)(\d{1,4})", name, re.ASCII) for name in names]
    return tuple(
        max((1 + int(each[2]) for each in found if each and each[1] == kind), default=0)
        for kind in _KINDS
    )


def say_counts(options: onnxruntime.SessionOptions, manifest: dict[str, Any] | None) -> None:
    """Tell the library which operators a package needs, for options that no other one will have."""
    with suppress(AttributeError, TypeError, KeyError):  # a manifest that is not valid: all
        if manifest is not None:
            counts = count_operators(manifest["operators"])
            if any(counts):
                options.add_session_config_entry(COUNTS, " ".join(map(str, counts)))


def register_kernels(options: onnxruntime.SessionOptions, model: Path) -> bool:
    """Let sessions of some options use native kernels, if a model can; whether they will."""
    # If the library cannot be registered, a warning says so once: the model computes the same
    # without it.
    with suppress(RuntimeError):  # it has no such entry
        return str(options.get_session_config_entry(ENTRY)) == "1"
    library = native_library()
    if library is None or not _may_use(model):
        return False
    try:
        options.register_custom_ops_library(str(library))
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        text = f"Native kernels are not used: {str(error).splitlines()[0]}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        options.add_session_config_entry(ENTRY, "0")
        return False
    options.add_session_config_entry(ENTRY, "1")
    return True


def choose_kernels(
    options: onnxruntime.SessionOptions, library: str | None, manifest: dict[str, Any] | None = None
) -> None:
    """Let sessions run the kernels of a library, or none, whatever the environment says."""
    # `manifest`: of the package whose models they run. Without one they have the kernels that the
    # options ask for already, or all.
    options.add_session_config_entry(ENTRY, "0" if library is None else "1")
    try:
        if library is not None:
            say_counts(options, manifest)
            options.register_custom_ops_library(library)
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        what = f"The library of native kernels cannot be registered: {str(error).splitlines()[0]}"
        raise OdtpackError("no-native-kernels", what, where=library) from error


def _may_use(model: Path) -> bool:
    """Whether a model names the domain; one in ORT format may have kept its nodes."""
    try:
        with (
            model.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return content.find(DOMAIN.encode()) >= 0
    except (OSError, ValueError):  # an empty file
        return False
