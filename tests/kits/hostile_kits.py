"""The program of each kit that reads the hostile corpus: a function for each, by the kit's name."""

from __future__ import annotations

import pytest

from tests.kits import kotlin_kit


def kotlin() -> list[str]:
    """The Kotlin kit's, where names of files are UTF-8 whatever the locale is."""
    if reason := kotlin_kit.unavailable():
        pytest.skip(reason)
    *words, _ = kotlin_kit.command("hostile")
    return ["env", "LC_ALL=C.UTF-8", *words]
