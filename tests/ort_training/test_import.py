"""What onnxruntime-training 1.19.2 began, an imported package goes on with as it would have."""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from odtpack.ort_training.importing import import_artifacts
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.self_check import self_check
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.training.loop import loss_of
from tests import zoo
from tests.ort_training import models
from tests.packaging_tools import distance_limit, losses_of_steps, open_training
from tests.peer import client

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(client.peer_available() is not None, reason=str(client.peer_available())),
]

Reference = Callable[[str], tuple[Path, dict[str, Any]]]
"""The folder of a case, by its name, and what the reference said of its training."""
BEFORE, AFTER = 3, 4  # steps in the reference, steps after the import
PROPERTIES = {"epoch": 3, "rate": 0.5, "note": "from a device"}
CLIPPED_ADAMW = {"kind": "adamw", "clip_grad": 0.5, "weight_decay": 0.05, "betas": [0.8, 0.99]}
WEIGHTED = """
  loss, logp = SoftmaxCrossEntropyLoss <reduction = "mean", ignore_index = 1> (y, labels, share)
"""
SQUARED = """
  each, logp = SoftmaxCrossEntropyLoss <reduction = "none"> (y, labels)
  square = Mul(each, each)
  loss = ReduceMean <keepdims = 0> (square)
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how the reference trains it, and what a package of it says of its loss."""

    build: Callable[[], onnx.ModelProto]
    optimizer: str | dict[str, Any]
    rate: float
    loss: str = "cross_entropy"
    size: int = 8
    prefix: str = ""
    found: str | None = None  # what the package calls the loss, if that is not its name
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        return models.feeds(self.build(), self.loss, self.size)


SMALL_MLP = lambda: zoo.mlp((6, 8, 10))  # noqa: E731
BATCH_NORM = {"requires_grad": models.TRAINED, "frozen": models.STATISTICS}
CASES = {
    "mlp-adamw": Case(zoo.mlp, "adamw", 1e-4, size=64),
    "mlp-sgd": Case(zoo.mlp, "sgd", 0.1, size=64),
    "cnn-adamw": Case(lambda: zoo.cnn(hidden=64), "adamw", 1e-3),
    "cnn-sgd-clip": Case(lambda: zoo.cnn(hidden=64), {"kind": "sgd", "clip_grad": 0.2}, 0.2),
    "transformer-adamw": Case(models.transformer, "adamw", 1e-3, size=4),
    "transformer-sgd": Case(models.transformer, "sgd", 0.05, size=4),
    "mobilenet-sgd": Case(models.mobilenet, "sgd", 2e-3, size=2),
    "mobilenet-adamw": Case(models.mobilenet, "adamw", 1e-4, size=2),
    "mse": Case(SMALL_MLP, CLIPPED_ADAMW, 0.02, "mse"),
    "l1": Case(SMALL_MLP, CLIPPED_ADAMW, 0.02, "l1"),
    "bce": Case(SMALL_MLP, CLIPPED_ADAMW, 0.02, "bce_with_logits"),
    "cross-entropy": Case(SMALL_MLP, CLIPPED_ADAMW, 0.02),
    "frozen": Case(SMALL_MLP, CLIPPED_ADAMW, 0.02, prefix="phone_",
                   options={"frozen": ["fc1.weight", "fc1.bias"],
                            "additional_output_names": ["output", "relu1/Relu"],
                            "nominal_checkpoint": True}),
    "batch-norm": Case(models.small, "sgd", 0.1, options=BATCH_NORM),
    "opset12": Case(lambda: zoo.mlp((20, 30, 10), opset=12), "adamw", 1e-2),
    "batch-norm-opset13": Case(models.small_opset13, "sgd", 0.1, options=BATCH_NORM),
    "own-loss": Case(lambda: models.small(WEIGHTED), "sgd", 0.1, "none", options=BATCH_NORM,
                     found="cross_entropy"),
    "classes-on-axis-1": Case(models.by_position, "sgd", 0.1),
    "target-first": Case(models.turned, "adamw", 0.02, "none", found="mse",
                         options={"requires_grad": ["w"]}),
    "unknown-loss": Case(lambda: models.small(SQUARED), "sgd", 0.1, "none", options=BATCH_NORM,
                         found="none"),
}  # fmt: skip
IN_TRAINING_MODE = {"batch-norm", "batch-norm-opset13", "own-loss", "unknown-loss"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Makes the artifacts of a case, a checkpoint of the middle and the run to the end."""
    folder = tmp_path_factory.mktemp("reference")

    @functools.cache
    def made(name: str) -> tuple[Path, dict[str, Any]]:
        case, artifacts = CASES[name], folder / name
        onnx.save(case.build(), folder / f"{name}.onnx")
        np.savez(folder / f"{name}.npz", **case.feeds)
        jobs: list[dict[str, Any]] = [{
            "command": "generate", "model": folder / f"{name}.onnx", "folder": artifacts,
            "optimizer": case.optimizer, "loss": case.loss, **case.options,
        }]  # fmt: skip
        for steps, saved in ((BEFORE, "middle"), (BEFORE + AFTER, "end")):
            jobs.append({
                "command": "train", "folder": artifacts, "inputs": folder / f"{name}.npz",
                "steps": steps, "learning_rate": case.rate, "optimizer_state": True,
                "save": artifacts / f"{saved}.ckpt", "properties": PROPERTIES,
                "parameters": folder / f"{name}-{saved}.npz",
                "with_eval": name not in IN_TRAINING_MODE,
            })  # fmt: skip
        answer = client.run_jobs(jobs)[-1]
        for path in list(artifacts.iterdir()):
            if not path.name.endswith(".ckpt"):
                path.rename(path.with_name(case.prefix + path.name))
        return artifacts, answer

    return made


@pytest.mark.parametrize("name", CASES)
def test_goes_on_as_the_reference_does(name, reference, tmp_path):
    case, (folder, answer) = CASES[name], reference(name)
    manifest = import_artifacts(folder, tmp_path / "package", checkpoint=folder / "middle.ckpt")
    package = Package.open(tmp_path / "package")
    verify_package(package.path)
    self_check(package)
    assert manifest.loss == (case.found or case.loss)
    assert {i.name: i.role for i in manifest.inputs}.get("target", "target") == "target"
    state, module, update = open_training(package.path)
    assert dict(state.properties) == PROPERTIES
    assert update.step_count == BEFORE
    # The reference saves the initial rate, which is 0.001, whatever rate was set.
    assert update.get_learning_rate() == pytest.approx(1e-3)
    update.set_learning_rate(case.rate)
    assert module.input_names() == answer["input_names"]
    feeds = [case.feeds[item] for item in module.input_names()]
    losses = losses_of_steps(module, update, [feeds] * AFTER)
    whole = answer["losses"]
    assert len(set(whole)) == BEFORE + AFTER
    tolerance = 2e-5 if update_is_smooth(case) else 1e-3
    assert losses == pytest.approx(whole[BEFORE:], rel=tolerance)
    with (
        np.load(folder.with_name(f"{name}-end.npz")) as end,
        np.load(folder.with_name(f"{name}-middle.npz")) as middle,
    ):
        assert set(end) == {key for key, _ in state.parameters}
        for key, value in end.items():
            if key == "bn_var":  # the reference takes the biased variance of a batch
                continue
            error = np.linalg.norm(state.parameters[key].data - value)
            moved = np.linalg.norm(value - middle[key])
            walk = 2 * AFTER * case.rate if "adamw" in name else 0.0
            assert error <= distance_limit(key, value, 10 * tolerance, walk) + 1e-7, key
            frozen = key in case.options.get("frozen", ()) and key != "bn_mean"
            assert (moved == 0) == frozen, key
    if name not in IN_TRAINING_MODE:
        loss = loss_of(module.eval()(*feeds))
        assert loss == pytest.approx(answer["eval_loss"], rel=tolerance)


def test_options_of_a_loss(reference, tmp_path):
    manifest = import_artifacts(reference("own-loss")[0], tmp_path / "package")
    assert manifest.loss_options["weight"] == [0.5, 1.0, 2.0]
    assert manifest.class_count == 3
    assert manifest.ignored_label == 1


def update_is_smooth(case: Case) -> bool:
    """AdamW makes a step of every gradient, also of one that is rounding error around zero."""
    return case.optimizer == "sgd" or isinstance(case.optimizer, dict)


def test_roles_names_and_extras(reference, tmp_path):
    folder, _ = reference("frozen")
    manifest = import_artifacts(folder, tmp_path / "package")
    assert [(p.name, p.role) for p in manifest.parameters] == [
        ("fc1.weight", "frozen"), ("fc1.bias", "frozen"),
        ("fc2.weight", "trainable"), ("fc2.bias", "trainable"),
    ]  # fmt: skip
    assert [(i.name, i.role, i.class_count) for i in manifest.inputs] == [
        ("input", "data", None), ("labels", "labels", 10),
    ]  # fmt: skip
    original = onnx.load(folder / "phone_eval_model.onnx").graph.output
    assert [o.name for o in manifest.outputs] == [value.name for value in original]
    assert manifest.files.nominal_checkpoint is not None
    settings = manifest.optimizer.as_dict()
    assert [settings[key] for key in ("beta1", "beta2", "weight_decay")] == [0.8, 0.99, 0.05]
    assert manifest.clip.norm == 0.5
    state, _, update = open_training(tmp_path / "package")
    assert update.step_count == 0
    assert len(state.properties) == 0


def test_checkpoints_of_the_app_load_in_the_package(reference, tmp_path):
    """Also those that were not imported, in both directions."""
    folder, answer = reference("frozen")
    import_artifacts(folder, tmp_path / "package")
    _, module, _ = open_training(tmp_path / "package", checkpoint=folder / "middle.ckpt")
    loss, *_ = module(*CASES["frozen"].feeds.values())
    assert float(loss) == pytest.approx(answer["losses"][BEFORE], rel=2e-5)
    seen = client.load(checkpoint=tmp_path / "package" / "checkpoint")
    assert {k: v["requires_grad"] for k, v in seen["parameters"].items()} == {
        "fc1.weight": False, "fc1.bias": False, "fc2.weight": True, "fc2.bias": True,
    }  # fmt: skip


def test_dropout_and_running_statistics(tmp_path):
    """Training drops as many as the model says, evaluation none; masks differ, so no losses."""
    onnx.save(models.small(ratio=0.5), tmp_path / "small.onnx")
    client.generate(
        model=tmp_path / "small.onnx", folder=tmp_path / "artifacts", optimizer="sgd",
        additional_output_names=["d", "f"], **BATCH_NORM,
    )  # fmt: skip
    manifest = import_artifacts(tmp_path / "artifacts", tmp_path / "package")
    assert [p.name for p in manifest.parameters if p.role == "state"] == models.STATISTICS
    state, module, _ = open_training(tmp_path / "package")
    feeds = models.feeds(models.small(), "cross_entropy", 64)
    before = state.parameters["bn_mean"].data.copy()
    _, dropped, full = module(*feeds.values())
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], 2 * full[kept], rtol=1e-6)
    assert 0.4 < kept.sum() / np.count_nonzero(full) < 0.6
    assert not np.array_equal(state.parameters["bn_mean"].data, before)
    _, dropped, full = module.eval()(*feeds.values())
    np.testing.assert_array_equal(dropped, full)


def test_batch_norm_that_was_exported_for_inference_trains_as_in_the_reference(tmp_path):
    """The reference turns it into training mode, even with statistics inside the model."""
    model = models.in_inference_mode()
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **models.feeds(model, "cross_entropy", 8))
    _, answer = client.run_jobs([
        {"command": "generate", "model": tmp_path / "model.onnx", "folder": tmp_path / "artifacts",
         "optimizer": "sgd", "requires_grad": models.TRAINED},
        {"command": "train", "folder": tmp_path / "artifacts", "inputs": tmp_path / "data.npz",
         "steps": 3, "learning_rate": 0.1},
    ])  # fmt: skip
    import_artifacts(tmp_path / "artifacts", tmp_path / "package")
    _, module, update = open_training(tmp_path / "package")
    update.set_learning_rate(0.1)
    losses = losses_of_steps(module, update, [models.feeds(model, "cross_entropy", 8).values()] * 3)
    assert losses == pytest.approx(answer["losses"], rel=2e-5)


def test_what_the_loss_does_not_read_is_exported(tmp_path):
    onnx.save(models.two_heads(), tmp_path / "heads.onnx")
    client.generate(
        model=tmp_path / "heads.onnx", folder=tmp_path / "artifacts", loss="mse", optimizer="sgd",
        requires_grad=["w", "trained"], frozen=["frozen"], loss_input_names=["near"],
    )  # fmt: skip
    import_artifacts(tmp_path / "artifacts", tmp_path / "package")
    verify_package(tmp_path / "package")
    models.check_heads(tmp_path / "package")


@pytest.mark.parametrize("change", ["prefix", "two"])
def test_prefixes(change, reference, tmp_path):
    shutil.copytree(reference("frozen")[0], tmp_path / "artifacts")
    prefix = None
    if change == "two":
        prefix = "phone_"
        for path in reference("mse")[0].iterdir():
            shutil.copy(path, tmp_path / "artifacts")
    manifest = import_artifacts(tmp_path / "artifacts", tmp_path / "package", prefix=prefix)
    assert manifest.loss == "cross_entropy"
    assert manifest.files.training_model.path == "training_model.onnx"
