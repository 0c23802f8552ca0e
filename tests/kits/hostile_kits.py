"""What each kit's readers make of hostile files: programs with ``hostile DIR``, ``read DIR``."""

from __future__ import annotations

import pytest

from tests.kits import cpp_kit, swift_kit


def cpp() -> list[str]:
    """The C++ kit."""
    if reason := cpp_kit.unavailable():
        pytest.skip(reason)
    return [str(cpp_kit.built("conformance"))]


def swift() -> list[str]:
    """The Swift kit."""
    if reason := swift_kit.unavailable():
        pytest.skip(reason)
    return swift_kit.command(swift_kit.built())
