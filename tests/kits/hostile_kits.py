"""The program of each kit that reads the hostile corpus: a function for each, by the kit's name.

A program takes ``hostile DIR`` or ``read DIR`` (:mod:`tests.hostile.python_reader` is Python's). A
kit whose tools are missing skips, as its other tests do.
"""

from __future__ import annotations

import sys

import pytest

from tests.kits import cpp_kit, swift_kit


def python() -> list[str]:
    """Python's own reader."""
    return [sys.executable, "-m", "tests.hostile.python_reader"]


def cpp() -> list[str]:
    """The C++ kit's conformance program."""
    if reason := cpp_kit.unavailable():
        pytest.skip(reason)
    return [str(cpp_kit.built("conformance"))]


def swift() -> list[str]:
    """The Swift kit."""
    if reason := swift_kit.unavailable():
        pytest.skip(reason)
    return swift_kit.command(swift_kit.built())


def kits() -> list[str]:
    """Names of the kits that have a program."""
    here = globals()
    return [name for name in ("python", "cpp", "kotlin", "swift", "node", "browser", "csharp")
            if callable(here.get(name))]  # fmt: skip


def hostile_command(kit: str) -> list[str]:
    """Return the command of a kit."""
    found: list[str] = globals()[kit]()
    return found
