"""Our artifacts and those of ONNX Runtime training 1.19.2, from one model file, learn the same."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.package_size import MODELS, measure
from odtpack_runtime import CheckpointState
from tests import zoo
from tests.ort_training import models
from tests.packaging_tools import (
    OPTIMIZERS,
    batch,
    distance_limit,
    generate,
    losses_of_steps,
    open_training,
)
from tests.peer import client
from tests.sweep import split

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(client.peer_available() is not None, reason=str(client.peer_available())),
]

STEPS = 10


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable[[], onnx.ModelProto]
    size: int
    seed: int
    rates: dict[str, float]


CASES = {
    "mlp": Case(zoo.mlp, 64, 0, {"sgd": 0.1, "adamw": 1e-3}),
    "cnn": Case(lambda: zoo.cnn(hidden=128), 8, 0, {"sgd": 0.05, "adamw": 1e-3}),
    "mobilenet": Case(models.mobilenet, 2, 3, {"sgd": 2e-3, "adamw": 1e-4}),
    # Opset 14: the reference cannot differentiate the LayerNormalization operator of opset 17.
    "transformer": Case(models.transformer, 4, 0, {"sgd": 0.05, "adamw": 1e-3}),
}


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model file of a case and its data; for each run our artifacts."""
    folder, case = tmp_path_factory.mktemp("agree"), CASES[name]
    model = case.build()
    onnx.save(model, folder / f"{name}.onnx")
    x, labels = batch(model, case.size, case.seed)
    np.savez(folder / f"{name}.npz", input=x, labels=labels)
    for optimizer, kind in OPTIMIZERS.items():
        generate(model, folder / "ours" / f"{name}-{optimizer}", kind)
    return folder


@pytest.fixture(scope="module")
def theirs(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What the reference says of the runs; all of them in one process, which is slow to start."""
    jobs: list[dict[str, Any]] = []
    for optimizer in OPTIMIZERS:
        run = f"{name}-{optimizer}"
        place, ours = folder / "theirs" / run, folder / "ours" / run / "checkpoint"
        train = {
            "command": "train", "folder": place, "inputs": folder / f"{name}.npz", "steps": STEPS,
            "learning_rate": CASES[name].rates[optimizer],
        }  # fmt: skip
        jobs += [
            {"command": "generate", "model": folder / f"{name}.onnx", "folder": place,
             "optimizer": optimizer},
            {**train, "parameters": place / "parameters.npz", "save": place / "saved",
             "optimizer_state": True},
            # The same from our checkpoint, and what it holds in their eyes.
            {**train, "checkpoint": ours},
            {"command": "load", "checkpoint": ours, "parameters": place / "ours.npz"},
        ]  # fmt: skip
    answers = client.run_jobs(jobs)
    keys = ("generate", "train", "train_ours", "load_ours")
    return {
        optimizer: dict(zip(keys, answers[4 * i : 4 * i + 4], strict=True))
        for i, optimizer in enumerate(OPTIMIZERS)
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_steps(name, optimizer, folder, theirs):
    answer = theirs[optimizer]
    state, module, update = open_training(folder / "ours" / f"{name}-{optimizer}")
    update.set_learning_rate(CASES[name].rates[optimizer])
    with np.load(folder / f"{name}.npz") as data:
        x, labels = data["input"], data["labels"]
    losses = losses_of_steps(module, update, [(x, labels)] * STEPS)
    assert losses[-1] < 0.9 * losses[0]
    # AdamW makes a step of every gradient, also of one that is rounding error around zero.
    tolerance, walk = 2e-5, 0.0
    if optimizer != "sgd":
        tolerance, walk = 1e-3, 2 * STEPS * CASES[name].rates[optimizer]
    assert losses == pytest.approx(answer["train"]["losses"], rel=tolerance)
    assert answer["train_ours"]["losses"] == pytest.approx(answer["train"]["losses"], rel=tolerance)
    evaluated = float(module.eval()(x, labels))
    assert evaluated == pytest.approx(answer["train"]["eval_loss"], rel=tolerance)
    with np.load(folder / "theirs" / f"{name}-{optimizer}" / "parameters.npz") as archive:
        assert set(archive) == {name for name, _ in state.parameters}
        for key, value in archive.items():
            error = np.linalg.norm(state.parameters[key].data - value)
            assert error <= distance_limit(key, value, 10 * tolerance, walk), key


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_checkpoints(name, optimizer, folder, theirs):
    run = f"{name}-{optimizer}"
    ours = CheckpointState.load_checkpoint(folder / "ours" / run / "checkpoint")
    seen = theirs[optimizer]["load_ours"]
    assert sorted(seen["parameters"]) == [key for key, _ in ours.parameters]
    assert all(entry["requires_grad"] for entry in seen["parameters"].values())
    with np.load(folder / "theirs" / run / "ours.npz") as archive:
        for key, parameter in ours.parameters:
            np.testing.assert_array_equal(archive[key], parameter.data)
    # What they wrote at build time holds what ours does; what they saved later continues here.
    other = CheckpointState.load_checkpoint(folder / "theirs" / run / "checkpoint")
    for key, parameter in ours.parameters:
        np.testing.assert_array_equal(other.parameters[key].data, parameter.data)
        assert other.parameters[key].requires_grad
    _, module, update = open_training(
        folder / "ours" / run, checkpoint=folder / "theirs" / run / "saved"
    )
    assert update.step_count == STEPS
    with np.load(folder / f"{name}.npz") as data:
        loss = float(module(data["input"], data["labels"]))
    assert loss == pytest.approx(theirs[optimizer]["train"]["eval_loss"], rel=2e-5)


# Packages are as small as the reference's artifacts, or much smaller.


@pytest.mark.parametrize("name", split(MODELS, lambda name: name != "transformer"))
def test_everything_trained_in_float32(name):
    sizes = measure(name)
    assert sizes.package <= 1.05 * sizes.reference
    assert sizes.nominal <= 0.05 * sizes.reference


@pytest.mark.parametrize("name", split(MODELS, lambda name: name != "mobilenet"))
def test_backbone_frozen_in_float16(name):
    sizes = measure(name, "float16", head=True)
    assert sizes.package <= 0.6 * sizes.reference
