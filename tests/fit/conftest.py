"""A small classifier of images with data, and what a search stands on."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.fit.search_context import SearchContext, make_search_context
from odtpack.recipe import BuildSpec
from odtpack_simulator.device.profile import DeviceProfile, parse_profile
from tests import zoo
from tests.cli.conftest import Run, run

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
    figure = 'kind = "assumed", source = "made up for a test"'
    lines = [
        "schema_version = 1", f'name = "test/{name}"', f'title = "Test {name}"', 'vendor = "Test"',
        'os = "linux"', "validated = false", "[memory]",
        f'bandwidth = {{ value = 4, low = 2, high = 8, unit = "GB/s", {figure} }}', "[cpu]",
        f'fp32_gemm = {{ value = {gflops}, threads = 1, unit = "GFLOPS", {figure} }}', "[power]",
        f'idle = {{ value = 1, unit = "W", {figure} }}',
        f'load = {{ value = {watts}, unit = "W", {figure} }}',
    ]  # fmt: skip
    return parse_profile("\n".join(lines).encode(), f"{name}.toml")


@pytest.fixture(scope="session")
def ground(files: Files, tmp_path_factory: pytest.TempPathFactory) -> SearchContext:
    return make_search_context(
        files.settings, files.data, tmp_path_factory.mktemp("ground"), seed=0
    )
