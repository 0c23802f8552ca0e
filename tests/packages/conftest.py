"""A small signed package that no test changes."""

from pathlib import Path

import pytest

from odtpack.build import build_package
from odtpack.update.release import new_key, sign_package
from tests import zoo


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package with a nominal checkpoint."""
    folder = tmp_path_factory.mktemp("built") / "package"
    build_package(zoo.mlp((6, 4, 3)), folder, loss="cross_entropy", nominal=True)
    return folder


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private key; the public one lies beside it, as ``key.pub``."""
    path = tmp_path_factory.mktemp("keys") / "key.pem"
    new_key(path)
    return path


@pytest.fixture(scope="session")
def signed(built: Path, key: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same package, signed."""
    import shutil

    folder = Path(shutil.copytree(built, tmp_path_factory.mktemp("signed") / "package"))
    sign_package(folder, key)
    return folder
