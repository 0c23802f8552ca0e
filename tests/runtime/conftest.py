"""Packages written by hand, one per test."""

from pathlib import Path

import pytest

from odtpack_runtime.session.native import VARIABLE
from tests import native_library
from tests.runtime import models


@pytest.fixture
def regression(tmp_path: Path) -> models.Files:
    return models.regression(tmp_path)


@pytest.fixture
def classifier(tmp_path: Path) -> models.Files:
    return models.classifier(tmp_path)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages train with the native library, where an option does not turn it off."""
    monkeypatch.setenv(VARIABLE, str(native_library.library()))
