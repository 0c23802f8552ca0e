"""The programs of the kits that read hostile files: ``hostile DIR`` and ``read DIR``."""
"""What each kit's readers make of hostile files: programs with ``hostile DIR``, ``read DIR``."""

from __future__ import annotations

import pytest

from tests.kits import swift_kit


def swift() -> list[str]:
    if reason := swift_kit.unavailable():
        pytest.skip(reason)
    return swift_kit.command(swift_kit.built())
from tests.kits import cpp_kit


def cpp() -> list[str]:
    """The C++ kit."""
    if reason := cpp_kit.unavailable():
        pytest.skip(reason)
    return [str(cpp_kit.built("conformance"))]
