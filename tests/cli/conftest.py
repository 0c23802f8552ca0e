"""A small model, its data and its package, and a way to run a command."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.build import build_package
from tests import zoo
from tests.command import Outcome, Run, assert_refused, run

__all__ = ["Outcome", "Run", "assert_refused", "run"]
SAMPLES = 60


@dataclasses.dataclass(frozen=True)
class Shared:
    """Files that no test changes."""

    model: Path
    data: Path
    package: Path

    def build(self, out: object, *more: object, loss: str = "cross_entropy") -> tuple[object, ...]:
        """The words that build the model."""
        return "build", self.model, "--out", out, "--loss", loss, *more

    def train(self, out: object, *more: object) -> tuple[object, ...]:
        """The words that train the package on the data."""
        return "train", self.package, "--data", self.data, "--out", out, *more


def arrays(samples: int = SAMPLES, classes: int = 3) -> dict[str, np.ndarray]:
    """Images [samples, 1, 8, 8] whose label is the brightest of three bands."""
    rng = np.random.default_rng(5)
    labels = np.arange(samples, dtype=np.int64) % classes
    images = rng.normal(0, 0.3, (samples, 1, 8, 8)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        image[0, 2 * label : 2 * label + 2] += 1.0
    return {"input": images, "labels": labels}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder = tmp_path_factory.mktemp("shared")
    files = Shared(folder / "model.onnx", folder / "data.npz", folder / "package")
    onnx.save(zoo.cnn(size=8, width=(4, 8), classes=3), files.model)
    np.savez(files.data, allow_pickle=False, **arrays())
    build_package(files.model, files.package, loss="cross_entropy")
    return files


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, by relative path; None for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


Refused = Callable[..., None]


@pytest.fixture
def refused(run: Run, tmp_path: Path) -> Callable[..., None]:
    """Run a command that must fail, and check that it changes no file."""

    def check(arguments: tuple[object, ...], code: str, *words: str) -> None:
        before = tree(tmp_path)
        assert_refused(run(*arguments), code, *words)
        assert tree(tmp_path) == before

    return check
