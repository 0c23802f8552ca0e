"""The C++ kit with packages that hold a step model; the vectors have more of them."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack.optimizers import SGD, AdamW, GroupRule, Optimizer
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.kits import cpp_kit
from tests.kits.cpp_kit import measure, run, save_batch
from tests.kits.harness import contents, job_file, needs, refusal, train, with_step_model_of
from tests.packaging_tools import built_package

pytestmark = needs(cpp_kit.unavailable())
WIDTHS = (64, 2048, 1024, 4)


def build(folder: Path, optimizer: Optimizer | None = None, **options: Any) -> Package:
    """A package whose step model cuts a matrix, with AdamW unless another optimizer is named."""
    options |= {"optimizer": optimizer or AdamW(), "step_model": "always"}
    return built_package(zoo.mlp(WIDTHS), folder, **options)


@pytest.fixture
def batch() -> dict[str, np.ndarray[Any, Any]]:
    """Noise with labels."""
    rng = np.random.default_rng(2)
    return {
        "input": rng.standard_normal((8, WIDTHS[0]), dtype=np.float32),
        "labels": rng.integers(0, WIDTHS[-1], 8),
    }


@pytest.fixture
def job(batch: dict[str, np.ndarray[Any, Any]], tmp_path: Path) -> dict[str, Any]:
    """Ten steps on one batch."""
    package = build(tmp_path / "package")
    return {"package": package.path, "steps": [save_batch(tmp_path, batch)], "count": 10,
            "threads": 1, "learning_rate": 0.01, "save": "cpp.ckpt"}  # fmt: skip


@pytest.mark.parametrize("variant", ["native", "sanitized"])
def test_an_app_may_ask_for_gradients_between_its_steps(variant, batch, job, tmp_path):
    """The first call that asks for them closes the step model; nothing else changes."""
    done = run("steps", job_file(job, tmp_path), variant=variant)
    assert done.returncode == 0, done.stderr
    losses, _ = train(job["package"], [batch], 8, tmp_path / "python.ckpt")
    assert [float(line.split()[0]) for line in done.stdout.splitlines()] == losses
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["1"] * 2 + ["0"] * 6
    assert contents(tmp_path / "cpp.ckpt") == contents(tmp_path / "python.ckpt")


def test_an_app_that_accumulates_trains_with_two_models(job, tmp_path):
    with_step = measure({**job, "accumulate": 2}, tmp_path)["losses"]
    whole = contents(tmp_path / "cpp.ckpt")
    assert measure({**job, "accumulate": 2, "step_model": False}, tmp_path)["losses"] == with_step
    assert contents(tmp_path / "cpp.ckpt") == whole
    assert whole["optimizer"][0] == 5


def test_gradients_take_no_memory(job, tmp_path):
    gradients = 4 * sum(a * b for a, b in itertools.pairwise(WIDTHS))
    peaks = [
        measure({**job, "step_model": choice}, tmp_path)["phases"]["train"]["peak_anonymous_bytes"]
        for choice in (True, False)
    ]
    assert peaks[1] - peaks[0] > 0.7 * gradients


@pytest.mark.parametrize("other", [
    {"optimizer": SGD()}, {"optimizer": SGD(momentum=0.9)},
    {"groups": (GroupRule("*bias", 0.1, 0.0),)},
])  # fmt: skip
def test_a_step_model_of_another_optimizer_is_refused(other, job, tmp_path):
    with_step_model_of(build(tmp_path / "other", **other), job["package"])
    assert "code: model-mismatch" in refusal(run, job, tmp_path)
