"""What each kit's readers make of hostile files: programs with ``hostile DIR``, ``read DIR``."""

from __future__ import annotations

import sys

import pytest

from tests.kits import cpp_kit, javascript, web_reader


def cpp() -> list[str]:
    """The C++ kit."""
    if reason := cpp_kit.unavailable():
        pytest.skip(reason)
    return [str(cpp_kit.built("conformance"))]


def js() -> list[str]:
    """The JavaScript kit in Node."""
    if reason := javascript.unavailable():
        pytest.skip(reason)
    return javascript.reader()


def browser() -> list[str]:
    """The JavaScript kit in Chromium."""
    if reason := javascript.unavailable() or web_reader.unavailable():
        pytest.skip(reason)
    return [sys.executable, "-m", "tests.kits.web_reader"]
