"""A small classifier of images with data, and what a search stands on."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.fit.search_context import SearchContext, make_search_context
from odtpack.recipe import BuildSpec
from odtpack_simulator.device.profile import DeviceProfile
from tests import zoo
from tests.cli.conftest import Run, run
from tests.simulator.profiles import figure, made_profile

__all__ = ["Run", "run"]

SAMPLES = 320
"""A fifth is held out; the other 256 are four whole batches of 64."""


@dataclasses.dataclass(frozen=True)
class Files:
    """Files that no test changes."""

    folder: Path
    model: Path
    data: Path

    @property
    def settings(self) -> BuildSpec:
        return BuildSpec(self.model, "cross_entropy")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Images [320, 1, 16, 16] of ten classes: a noisy pattern of each."""
    folder = tmp_path_factory.mktemp("fit")
    onnx.save(zoo.cnn(size=16, width=(16, 32)), folder / "model.onnx")
    random = np.random.default_rng(1)
    labels = np.arange(SAMPLES, dtype=np.int64) % 10
    images = random.random((10, 1, 16, 16))[labels] + random.normal(0, 0.2, (SAMPLES, 1, 16, 16))
    np.savez(folder / "data.npz", input=images.astype(np.float32), labels=labels)
    return Files(folder, folder / "model.onnx", folder / "data.npz")


def device(name: str, *, gflops: float, watts: float) -> DeviceProfile:
    """A made-up device without a memory limit, of which time and energy are known."""
    gemm = figure(gflops, "GFLOPS", threads=1)
    more = {"power__idle": 1, "power__load": watts, "memory__bandwidth": (2, 4, 8)}
    return made_profile(f"test/{name}", cpu__fp32_gemm=gemm, **more)


@pytest.fixture(scope="session")
def ground(files: Files, tmp_path_factory: pytest.TempPathFactory) -> SearchContext:
    return make_search_context(
        files.settings, files.data, tmp_path_factory.mktemp("ground"), seed=0
    )
