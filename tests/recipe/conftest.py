"""A model with its recipe, and a way to run a command."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests import zoo
from tests.cli.conftest import Run, run

__all__ = ["Run", "run"]

RECIPE = 'model = "factory.onnx"\npackage = "package"\n\n[loss]\nkind = "cross_entropy"\n'

Write = Callable[[str], Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(zoo.cnn(size=8, width=(4, 8), classes=3), tmp_path / "factory.onnx")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Write:
    """Write the recipe with more in it."""

    def do(more: str) -> Path:
        path = folder / "recipe.toml"
        path.write_text(RECIPE + more)
        return path

    return do
