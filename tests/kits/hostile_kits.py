"""The program of each kit that reads the hostile corpus, by ``hostile DIR`` or ``read DIR``."""

import sys
from collections.abc import Callable

import pytest

from tests.kits import cpp_kit, csharp_kit, javascript, kotlin_kit, swift_kit, web_reader


def _kotlin() -> list[str]:
    """Names of files are UTF-8 whatever the locale is."""
    *words, _ = kotlin_kit.command("hostile")
    return ["env", "LC_ALL=C.UTF-8", *words]


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", name]


KITS: dict[str, tuple[Callable[[], str | None], Callable[[], list[str]]]] = {
    "python": (lambda: None, lambda: _module("tests.hostile.python_reader")),
    "cpp": (cpp_kit.unavailable, lambda: cpp_kit.command("conformance")),
    "kotlin": (kotlin_kit.unavailable, _kotlin),
    "swift": (swift_kit.unavailable, lambda: swift_kit.command(swift_kit.built())),
    "csharp": (csharp_kit.unavailable, lambda: csharp_kit.command(csharp_kit.built())),
    "node": (javascript.unavailable, javascript.reader),
    "browser": (lambda: javascript.unavailable() or web_reader.unavailable(),
                lambda: _module("tests.kits.web_reader")),
}  # fmt: skip
"""Why a kit is not here, and its command."""


def hostile_command(kit: str) -> list[str]:
    """Return the command of a kit."""
    unavailable, command = KITS[kit]
    if reason := unavailable():
        pytest.skip(reason)
    return command()
