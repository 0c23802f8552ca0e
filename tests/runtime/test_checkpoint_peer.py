"""Checkpoints travel between odtpack and ONNX Runtime training 1.19.2, in both directions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import CheckpointData
from tests.packaging_tools import losses_of_steps
from tests.peer import client
from tests.runtime import models

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(client.peer_available() is not None, reason=str(client.peer_available())),
]

RATE = 0.05
OPTIMIZERS = {"adamw": {"kind": "adamw", "weight_decay": 0.01}, "sgd": "sgd"}
FORWARD = f"""{models.HEADER}
forward (float[batch, 3] input) => (float[batch, 2] prediction)
   <float[3, 2] W = {{0.1, 0.2, 0.3, 0.4, 0.5, 0.6}}, float[3] scale = {{1, -2, 0.5}},
    float[2] b = {{0.7, 0.8}}>
{{
    scaled = Mul(input, scale) product = MatMul(scaled, W) prediction = Add(product, b)
}}"""
TRAINING = models.REGRESSION_TRAINING.split("batch_mean =")[0] + "}"
for old, new in (
    ("float[2] b, float[3] mean,", "float[2] b,"),
    (", float[3] mean_update_out)", ")"),
):
    TRAINING = TRAINING.replace(old, new)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of the reference for AdamW and SGD, our models, and data."""
    folder = tmp_path_factory.mktemp("peer")
    models.write(folder, "forward.onnx", FORWARD)
    models.write(folder, "training.onnx", TRAINING)
    for kind, text in (("adamw", models.ADAMW), ("sgd", models.SGD)):
        models.write(folder, f"{kind}.onnx", text, {"odtpack.optimizer": kind})
    np.savez(
        folder / "data.npz", **dict(zip(("input", "target"), models.feeds(5, 12), strict=True))
    )
    client.run_jobs([
        {"command": "generate", "model": folder / "forward.onnx", "folder": folder / kind,
         "requires_grad": ["W", "b"], "frozen": ["scale"], "loss": "mse", "optimizer": options,
         "nominal_checkpoint": True}
        for kind, options in OPTIMIZERS.items()
    ])  # fmt: skip
    return folder


def ours(folder, kind, checkpoint, steps, save=None):
    """Steps on our runtime with the data that the reference gets too."""
    state = CheckpointState.load_checkpoint(checkpoint)
    module = Module(folder / "training.onnx", state)
    optimizer = Optimizer(folder / f"{kind}.onnx", module)
    optimizer.set_learning_rate(RATE)
    with np.load(folder / "data.npz") as data:
        batch = data["input"], data["target"]
    losses = losses_of_steps(module, optimizer, [batch] * steps)
    state.properties["steps"] = steps
    state.properties["rate"] = RATE
    state.properties["name"] = "ä"
    if save:
        CheckpointState.save_checkpoint(state, save, include_optimizer_state=True)
    return losses, state


def theirs(folder: Path, kind: str, steps: int, **options: Any) -> dict[str, Any]:
    return {
        "command": "train", "folder": folder / kind, "inputs": folder / "data.npz", "steps": steps,
        "learning_rate": RATE, "with_eval": False, "optimizer_state": True, **options,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_run_that_changes_sides(folder, kind, tmp_path):
    start = folder / kind / "checkpoint"
    straight, state = ours(folder, kind, start, 8)
    ours(folder, kind, start, 3, tmp_path / "ours")
    there, cont, saved, seen = client.run_jobs([
        theirs(folder, kind, 8, parameters=tmp_path / "end.npz"),
        theirs(folder, kind, 5, checkpoint=tmp_path / "ours"),
        theirs(folder, kind, 3, save=tmp_path / "theirs", properties={"i": 7, "f": 0.5}),
        {"command": "load", "checkpoint": tmp_path / "ours", "parameters": tmp_path / "ours.npz"},
    ])  # fmt: skip
    assert saved["losses"] == there["losses"][:3]
    np.testing.assert_allclose(straight, there["losses"], rtol=1e-5)
    # Ours, saved after three steps, goes on over there; and theirs over here.
    np.testing.assert_allclose(cont["losses"], straight[3:], rtol=1e-5)
    assert not CheckpointState.load_checkpoint(tmp_path / "theirs").checked
    back, back_state = ours(folder, kind, tmp_path / "theirs", 5)
    np.testing.assert_allclose(back, there["losses"][3:], rtol=1e-5)
    assert back_state.properties["i"] == 7
    assert back_state.properties["f"] == 0.5
    assert back_state.optimizer.step == 8
    with np.load(tmp_path / "end.npz") as end:
        for name, parameter in state.parameters:
            np.testing.assert_allclose(parameter.data, end[name], rtol=1e-4, atol=1e-6)
    # What the reference reads in our file is bit by bit what we wrote.
    loaded = CheckpointState.load_checkpoint(tmp_path / "ours")
    assert loaded.checked
    with np.load(tmp_path / "ours.npz") as arrays:
        assert sorted(arrays) == [name for name, _ in loaded.parameters]
        for name, parameter in loaded.parameters:
            assert parameter.data.tobytes() == arrays[name].tobytes()
            assert seen["parameters"][name]["requires_grad"] == parameter.requires_grad
    assert seen["properties"] == {
        "steps": 3, "rate": float(np.float32(RATE)), "name": "ä", "odtpack.optimizer": kind,
    }  # fmt: skip


def test_what_the_reference_changes_carries_no_stale_digest(folder, tmp_path):
    ours(folder, "adamw", folder / "adamw" / "checkpoint", 3, tmp_path / "ours")
    (job,) = client.run_jobs(
        [theirs(folder, "adamw", 2, checkpoint=tmp_path / "ours", save=tmp_path / "theirs")]
    )
    assert len(job["losses"]) == 2
    assert b"sha256:" not in (tmp_path / "theirs").read_bytes()
    back = CheckpointState.load_checkpoint(tmp_path / "theirs")
    assert not back.checked
    assert "without a digest" in repr(back)
    assert back.optimizer.step == 5


def test_external_data_travel(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 16)
    start = folder / "adamw" / "checkpoint"
    straight, _ = ours(folder, "adamw", start, 6)
    for _ in range(2):  # the second time behind the first data
        ours(folder, "adamw", start, 3, tmp_path / "ours")
    (result,) = client.run_jobs([theirs(folder, "adamw", 3, checkpoint=tmp_path / "ours")])
    np.testing.assert_allclose(result["losses"], straight[3:], rtol=1e-5)


def test_nominal_states_travel(folder, tmp_path):
    state = CheckpointState.load_checkpoint(folder / "adamw" / "nominal_checkpoint")
    assert state.is_nominal
    assert [name in state.parameters for name in ("W", "b", "scale", "mean")] == [1, 1, 1, 0]
    complete = CheckpointState.load_checkpoint(folder / "adamw" / "checkpoint").snapshot(False)
    nominal = CheckpointData(complete.trainable, complete.frozen, nominal=True)
    writer.write_checkpoint(tmp_path / "nominal", nominal)
    with pytest.raises(client.PeerError, match=r"nominal|parameter states"):
        client.load(checkpoint=tmp_path / "nominal")
