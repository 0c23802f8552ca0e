"""The conformance suite, written once for all of its tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.vectors import write_suite


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kits") / "vectors"
    write_suite(folder)
    return folder
