"""The program of each kit that reads the hostile corpus: a function for each, by the kit's name.

A program takes ``hostile DIR`` or ``read DIR`` (:mod:`tests.hostile.python_reader` is Python's). A
kit whose tools are missing skips, as its other tests do.
"""

from __future__ import annotations

import sys

import pytest

from tests.kits import cpp_kit, csharp_kit, javascript, kotlin_kit, swift_kit, web_reader


def python() -> list[str]:
    """Python's own reader."""
    return [sys.executable, "-m", "tests.hostile.python_reader"]


def cpp() -> list[str]:
    """The C++ kit's conformance program."""
    if reason := cpp_kit.unavailable():
        pytest.skip(reason)
    return cpp_kit.command("conformance")


def kotlin() -> list[str]:
    """The Kotlin kit's, where names of files are UTF-8 whatever the locale is."""
    if reason := kotlin_kit.unavailable():
        pytest.skip(reason)
    *words, _ = kotlin_kit.command("hostile")
    return ["env", "LC_ALL=C.UTF-8", *words]


def swift() -> list[str]:
    """The Swift kit's conformance program."""
    if reason := swift_kit.unavailable():
        pytest.skip(reason)
    return swift_kit.command(swift_kit.built())


def csharp() -> list[str]:
    """The C# kit's conformance program."""
    if reason := csharp_kit.unavailable():
        pytest.skip(reason)
    return csharp_kit.command(csharp_kit.built())


def node() -> list[str]:
    """The JavaScript kit in Node."""
    if reason := javascript.unavailable():
        pytest.skip(reason)
    return javascript.reader()


def browser() -> list[str]:
    """The JavaScript kit in Chromium."""
    if reason := javascript.unavailable() or web_reader.unavailable():
        pytest.skip(reason)
    return [sys.executable, "-m", "tests.kits.web_reader"]


KITS = {
    "python": python, "cpp": cpp, "kotlin": kotlin, "swift": swift, "csharp": csharp, "node": node,
    "browser": browser,
}  # fmt: skip


def kits() -> list[str]:
    """Names of the kits that have a program."""
    return list(KITS)


def hostile_command(kit: str) -> list[str]:
    """Return the command of a kit."""
    return KITS[kit]()
