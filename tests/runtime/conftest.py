"""Packages written by hand, one per test."""

from pathlib import Path

import pytest

from tests.runtime import models


@pytest.fixture
def regression(tmp_path: Path) -> models.Files:
    return models.regression(tmp_path)


@pytest.fixture
def classifier(tmp_path: Path) -> models.Files:
    return models.classifier(tmp_path)
