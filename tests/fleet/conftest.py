"""The digits with their package, written once."""

from pathlib import Path

import pytest

from tests.fleet.fleets import write_digits


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What no test changes."""
    return write_digits(tmp_path_factory.mktemp("digits"))
