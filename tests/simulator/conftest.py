"""Packages, built once for all tests of the simulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulator.packages import Case, make_case


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Build a case by name, once."""
    built: dict[str, Case] = {}

    def build(name: str) -> Case:
        if name not in built:
            built[name] = make_case(name, tmp_path_factory.mktemp(name))
        return built[name]

    return build
