"""The programs of the kits that read hostile files: ``hostile DIR`` and ``read DIR``."""

from __future__ import annotations

import pytest

from tests.kits import swift_kit


def swift() -> list[str]:
    if reason := swift_kit.unavailable():
        pytest.skip(reason)
    return swift_kit.command(swift_kit.built())
