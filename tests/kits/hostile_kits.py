"""What each kit's readers make of hostile files: programs with ``hostile DIR``, ``read DIR``."""

from __future__ import annotations

import pytest

from tests.kits import cpp_kit


def cpp() -> list[str]:
    """The C++ kit."""
    if reason := cpp_kit.unavailable():
        pytest.skip(reason)
    return [str(cpp_kit.built("conformance"))]
