"""What the tests of the kits share: packages, batches, files of batches, and the same in Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.optimizers import GroupRule, make_optimizer
from odtpack.passes import mixed
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.session.graph_signature import LOSS_SCALE_NAMES
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.training.loop import loss_of
from tests import zoo

STEPS = 18
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"nominal": True},
    "sgd": {"optimizer": make_optimizer("sgd", {"momentum": 0.9})},
    "plain sgd": {"optimizer": make_optimizer("sgd", {})},
    "adafactor": {"optimizer": make_optimizer("adafactor", {})},
    "clipped": {"clip_norm": 0.5},
    "groups": {"groups": (GroupRule("*bias", 0.1, 0.0),)},
    "step model": {"step_model": "always"},
    "mixed": {"precision": "mixed"},
    "mixed step": {"precision": "mixed", "step_model": "always"},
}
OVERFLOWS = mock.patch.dict(mixed.STATES, {LOSS_SCALE_NAMES[0]: np.inf})
"""The first step of what is built in mixed precision is skipped."""
Batch = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packages of a small CNN for several optimizers."""
    folder = tmp_path_factory.mktemp("packages")
    model = zoo.cnn(size=8, width=(4, 8), classes=3)
    for name, each in OPTIONS.items():
        with OVERFLOWS:
            build_package(model, folder / name, loss="cross_entropy", **each)
    return {name: folder / name for name in OPTIONS}


@pytest.fixture(scope="module")
def batches(packages: dict[str, Path]) -> list[Batch]:
    """Three batches of noise with labels, the last one smaller."""
    image = json.loads((packages["adamw"] / "manifest.json").read_text())["inputs"][0]
    rng = np.random.default_rng(3)
    return [
        {
            image["name"]: rng.standard_normal((size, *image["shape"][1:]), dtype=np.float32),
            "labels": rng.integers(0, 3, size),
        }
        for size in (8, 8, 5)
    ]


@pytest.fixture
def job(batches: list[Batch], tmp_path: Path) -> dict[str, Any]:
    """Steps on the batches in turn, and an evaluation, on one thread."""
    steps = [save_batch(tmp_path / str(index), batch) for index, batch in enumerate(batches)]
    return {"steps": steps, "evaluation": steps[0], "count": STEPS, "threads": 1,
            "learning_rate": 0.01}  # fmt: skip


def save_batch(folder: Path, arrays: Batch) -> dict[str, Any]:
    """Write a batch as jobs of C++ and Swift name it; paths are absolute."""
    return {
        "inputs": [{"name": name, **each} for name, each in save_arrays(folder, **arrays).items()]
    }


def save_arrays(folder: Path, **arrays: np.ndarray[Any, Any]) -> dict[str, dict[str, Any]]:
    """Write a batch as the tasks of JavaScript and Kotlin name it."""
    folder.mkdir(exist_ok=True)
    data = {}
    for name, array in arrays.items():
        path = folder / f"{name}.bin"
        array.tofile(path)
        data[name] = {"file": str(path), "dtype": str(array.dtype), "shape": list(array.shape)}
    return data


def train(
    package: Path, batches: list[Batch], count: int, save: Path, checkpoint: Path | None = None
) -> tuple[list[float], float]:
    """What a job does, in Python; returns the losses of the steps and of the evaluation."""
    state = CheckpointState.load_checkpoint(checkpoint or package / "checkpoint")
    model = package / "training_model.onnx"
    options = default_session_options(model, threads=1)
    module = Module(model, state, package / "eval_model.onnx", session_options=options)
    optimizer = Optimizer(package / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    losses = []
    for step in range(count):
        losses.append(float(module(*batches[step % len(batches)].values())))
        optimizer.step()
        module.lazy_reset_grad()
    loss = loss_of(module.eval()(*batches[0].values()))
    CheckpointState.save_checkpoint(state, save, include_optimizer_state=True)
    return losses, loss


def contents(path: Path) -> dict[str, Any]:
    """Everything that a checkpoint says, with arrays as bytes."""
    data = read_checkpoint(path)
    optimizer = data.optimizer
    arrays = {**data.trainable, **data.frozen}
    moments = optimizer.moments if optimizer else {}
    return {
        "arrays": {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()},
        "trained": sorted(data.trainable),
        "moments": {name: [m.tobytes() for m in own] for name, own in moments.items()},
        "optimizer": optimizer
        and (optimizer.step, optimizer.learning_rate, optimizer.groups, optimizer.kind),
        "properties": data.properties,
    }


def passes(suite: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Check that each case of the suite passed, and that there were cases."""
    cases = [case["name"] for case in json.loads((suite / "index.json").read_text())["cases"]]
    failed = [line for line in done.stdout.splitlines() if not line.startswith("passed")]
    assert not failed, failed[0] + done.stderr[-4000:]
    assert done.stdout.splitlines() == [f"passed {name}" for name in cases]
    assert len(cases) > 80
