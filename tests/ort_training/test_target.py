"""What is built for onnxruntime-training, its release 1.19.2 trains as PyTorch does."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.build import build_package
from odtpack.choices import STOCK, OrtFormat
from odtpack.optimizers import SGD, Adafactor, Adam, AdamW, GroupRule, Lion, Optimizer
from odtpack.ort_training.importing import import_artifacts
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.training.schedules import ScheduleSpec
from tests import zoo
from tests.cli.conftest import assert_refused
from tests.model_text import retyped
from tests.ort_training import models
from tests.packaging_tools import batch, losses_of_steps, open_training
from tests.peer import client
from tests.refused import refused
from tests.training import runs, settled

peer = pytest.mark.peer
needs_peer = pytest.mark.skipif(
    client.peer_available() is not None, reason=str(client.peer_available())
)
TARGET = "ort-training"


def _cnn() -> onnx.ModelProto:
    """Convolutions padded SAME_UPPER, whose gradients the reference itself gets wrong."""
    model = zoo.cnn(hidden=32)
    for node in model.graph.node:
        if node.op_type == "Conv":
            kept = [a for a in node.attribute if a.name not in ("pads", "auto_pad")]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("auto_pad", "SAME_UPPER")])
    return model


def _mobilenet() -> onnx.ModelProto:
    x, _ = batch(zoo.mobilenet_v2(), 3, seed=10)
    return settled.mobilenet("train", x)


PYTORCH: dict[str, tuple[Callable[[], onnx.ModelProto], int, int, float]] = {
    "mlp": (zoo.mlp, 64, 0, 0.1),
    "cnn": (_cnn, 8, 0, 0.05),
    "transformer-opset17": (lambda: models.transformer(17), 4, 0, 0.05),
    "mobilenet-batch-norm": (_mobilenet, 3, 10, 0.02),
}


@peer
@needs_peer
@pytest.mark.parametrize("name", PYTORCH)
def test_ten_steps_follow_pytorch(name, tmp_path):
    build, size, seed, rate = PYTORCH[name]
    model = build()
    x, labels = batch(model, size, seed)
    np.savez(tmp_path / "data.npz", input=x, labels=labels)
    build_package(
        model, tmp_path / "package", loss="cross_entropy", optimizer=SGD(), runtime=TARGET
    )
    answer = client.train(
        folder=tmp_path / "package", inputs=tmp_path / "data.npz", steps=runs.STEPS,
        learning_rate=rate, parameters=tmp_path / "parameters.npz",
    )  # fmt: skip
    theirs = runs.pytorch(model, x, labels, rate)
    assert theirs.losses[-1] < 0.9 * theirs.losses[0]
    assert answer["losses"] == pytest.approx(theirs.losses, rel=1e-5)
    initial = runs.initial(model)
    with np.load(tmp_path / "parameters.npz") as archive:
        assert set(archive) == set(theirs.values)
        for key, value in archive.items():
            if key.endswith("running_var"):
                continue  # see test_running_statistics
            wanted = theirs.values[key]
            error, way = np.linalg.norm(value - wanted), np.linalg.norm(wanted - initial[key])
            assert error < 1e-4 * way + 1e-6 * np.linalg.norm(wanted) + 1e-8, key
    if "batch-norm" not in name:
        assert answer["eval_loss"] == pytest.approx(theirs.eval_loss, rel=1e-5)


def both(folder, model, feeds, **options):
    """Data, and a package of each runtime."""
    np.savez(folder / "data.npz", **feeds)
    build_package(model, folder / "theirs", runtime=TARGET, **options)
    verify_package(folder / "theirs")
    build_package(model, folder / "ours", **options)


OPTIMIZERS: dict[str, tuple[Optimizer, dict[str, Any], float]] = {
    "sgd-clip": (SGD(), {"clip_norm": 0.2}, 0.2),
    "adamw": (AdamW(), {}, 0.01),
    "adamw-settings": (AdamW(weight_decay=0.1, beta1=0.7, beta2=0.95, epsilon=1e-3),
                       {"clip_norm": 0.2}, 0.01),
    "adamw-pytorch": (AdamW(weight_decay=0.1, formula="pytorch"), {}, 0.01),
    "adamw-uncorrected": (AdamW(bias_correction=False, epsilon=1e-3), {}, 0.01),
}  # fmt: skip


@peer
@needs_peer
@pytest.mark.parametrize(("name", "loss"), [
    *itertools.product(OPTIMIZERS, ["cross_entropy"]),
    *itertools.product(["sgd-clip"], ["mse", "l1", "bce_with_logits"]),
])  # fmt: skip
def test_both_runtimes_agree(name, loss, tmp_path):
    """Optimizers, losses, accumulation and additional outputs, on stock ONNX Runtime and there."""
    optimizer, update, rate = OPTIMIZERS[name]
    model = zoo.mlp((6, 8, 10))
    feeds = models.feeds(model, loss, 8)
    options = {"loss": loss, "freeze": ["fc1.bias"], "outputs": ["output"]}
    both(tmp_path, model, feeds, optimizer=optimizer, **update, **options)
    answer = client.train(
        folder=tmp_path / "theirs", inputs=tmp_path / "data.npz", steps=5, accumulate=2,
        batch=3, learning_rate=rate, parameters=tmp_path / "parameters.npz",
        save=tmp_path / "saved", optimizer_state=True,
    )  # fmt: skip
    state, module, step = open_training(tmp_path / "ours")
    step.set_learning_rate(rate)
    losses, position = [], 0
    for _ in range(5):
        for _ in range(2):
            rows = np.arange(position, position + 3) % 8
            position += 3
            losses.append(float(module(*(array[rows] for array in feeds.values()))[0]))
        step.step()
        module.lazy_reset_grad()
    assert answer["input_names"] == module.input_names()
    assert len({round(value, 3) for value in losses}) > 5
    assert answer["losses"] == pytest.approx(losses, rel=1e-5)
    with np.load(tmp_path / "parameters.npz") as archive:
        for key, parameter in state.parameters:
            np.testing.assert_allclose(archive[key], parameter.data, rtol=1e-4, atol=1e-6)
    # The checkpoint that training there saved goes on here.
    _, module, step = open_training(tmp_path / "ours", checkpoint=tmp_path / "saved")
    assert step.step_count == 5


@peer
@needs_peer
def test_running_statistics(tmp_path):
    """They follow the batch there too, the variance without n / (n - 1)."""
    model = models.small()
    feeds = models.feeds(model, "cross_entropy", 8)
    both(tmp_path, model, feeds, loss="cross_entropy", optimizer=SGD(), train=models.TRAINED)
    client.train(
        folder=tmp_path / "theirs", inputs=tmp_path / "data.npz", steps=1, learning_rate=0.1,
        parameters=tmp_path / "parameters.npz",
    )  # fmt: skip
    state, module, _ = open_training(tmp_path / "ours")
    old = {name: state.parameters[name].data.copy() for name in models.STATISTICS}
    module(*feeds.values())
    count = 8 * 6 * 6
    with np.load(tmp_path / "parameters.npz") as archive:
        for name, share in (("bn_mean", 1.0), ("bn_var", (count - 1) / count)):
            ours = state.parameters[name].data - 0.8 * old[name]
            np.testing.assert_allclose(archive[name] - 0.8 * old[name], share * ours, rtol=1e-4)


@peer
@needs_peer
def test_frozen_float16_parameters_load_there(tmp_path):
    """1.19.2 reads no float16 from a checkpoint: what is frozen is stored as float32 as well."""
    model = retyped(zoo.mlp((6, 8, 4)), np.float16)
    x, labels = batch(model, 8, classes=4)
    feeds = {"input": x.astype(np.float16), "labels": labels}
    chosen = {"train": ["fc2.*"], "freeze": ["fc1.*"]}
    both(tmp_path, model, feeds, loss="cross_entropy", optimizer=SGD(), **chosen)
    answer = client.train(
        folder=tmp_path / "theirs", inputs=tmp_path / "data.npz", steps=2, learning_rate=0.1
    )
    _, module, update = open_training(tmp_path / "ours")
    update.set_learning_rate(0.1)
    losses = losses_of_steps(module, update, [feeds.values()] * 2)
    assert answer["losses"] == pytest.approx(losses, rel=1e-2)


def test_names_and_types_are_the_reference_s(tmp_path):
    generate_artifacts(
        zoo.mlp((6, 8, 4)), requires_grad=["fc2.weight"], loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW, artifact_directory=tmp_path, prefix="p_", target=TARGET,
    )  # fmt: skip
    graph = onnx.load(tmp_path / "p_training_model.onnx").graph
    assert [value.name for value in graph.input] == [
        "input", "labels", "fc2.weight", "fc2.weight_grad.accumulation.buffer", "lazy_reset_grad",
    ]  # fmt: skip
    out = graph.output[1]
    assert out.name == "fc2.weight_grad.accumulation.out"
    assert out.type.tensor_type.elem_type == onnx.TensorProto.BOOL
    assert [d.dim_value for d in out.type.tensor_type.shape.dim] == [1]
    assert [node.op_type for node in graph.node if node.domain] == ["InPlaceAccumulatorV2"]
    model = onnx.load(tmp_path / "p_optimizer_model.onnx")
    assert [value.name for value in model.graph.input] == [
        "learning_rate", "step", "params", "gradients", "first_order_moments",
        "second_order_moments",
    ]  # fmt: skip
    assert all(value.type.HasField("sequence_type") for value in model.graph.input[2:])
    assert model.ir_version <= 10


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lion": ({"optimizer": Lion()}, "the optimizer lion"),
    "adam": ({"optimizer": Adam()}, "the optimizer adam"),
    "adafactor": ({"optimizer": Adafactor()}, "the optimizer adafactor"),
    "momentum": ({"optimizer": SGD(momentum=0.9)}, "momentum and weight decay of SGD"),
    "decay": ({"optimizer": SGD(weight_decay=0.1)}, "momentum and weight decay of SGD"),
    "clip-value": ({"clip_value": 1.0}, "clipping by value"),
    "groups": ({"groups": (GroupRule("fc1.*", 0.1),)}, "parameter groups"),
    "schedule": ({"schedule": ScheduleSpec("cosine", {})}, "a schedule"),
    "ort-format": ({"ort_format": OrtFormat()}, "ORT format"),
    "float16": ({"frozen_storage": "float16", "freeze": ["fc1.*"]}, "no float16 values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused(name, tmp_path):
    options, words = REFUSED[name]
    with refused("target-cannot", words) as caught:
        build_package(
            zoo.mlp((6, 8, 4)), tmp_path / "p", loss="cross_entropy", runtime=TARGET, **options
        )
    assert caught.value.hint
    assert not (tmp_path / "p").exists()


def test_a_model_that_it_cannot_load_is_refused(tmp_path):
    new = zoo.mlp((6, 8, 4))
    new.ir_version, new.opset_import[0].version = 11, 23
    double = retyped(zoo.mlp((6, 8, 4)), np.float64)
    for model, code in ((new, "opset-too-new"), (double, "target-cannot")):
        with refused(code):
            build_package(model, tmp_path / "p", loss="cross_entropy", runtime=TARGET)


def test_commands(run, tmp_path):
    """Stock ONNX Runtime exports such a package, and says that it cannot train it."""
    onnx.save(zoo.mlp((6, 8, 4)), tmp_path / "model.onnx")
    feeds = models.feeds(zoo.mlp((6, 8, 4)), "cross_entropy", 8)
    np.savez(tmp_path / "data.npz", input=feeds["input"], labels=feeds["labels"] % 4)
    package = tmp_path / "package"
    built = run(
        "build", tmp_path / "model.onnx", "--out", package, "--loss", "cross_entropy",
        "--target", TARGET, "--json", code=0)  # fmt: skip
    assert "runs on onnxruntime-training 1.19" in built.err
    assert built.json()["target"] == TARGET
    assert "runs on     onnxruntime-training 1.19\n" in run("inspect", package).out
    data = ("--data", tmp_path / "data.npz")
    assert_refused(run("train", package, *data), "package-target", "onnxruntime-training")
    assert_refused(run("simulate", package, *data, "--device", "pi-5"), "package-target")
    run("export", package, "--outputs", "output", "--out", tmp_path / "m.onnx", code=0)
    assert_refused(
        run("build", tmp_path / "model.onnx", "--out", tmp_path / "p", "--loss", "mse",
            "--target", TARGET, "--optimizer", "lion"),
        "target-cannot", "lion",
    )  # fmt: skip


def test_what_the_loss_does_not_read_is_exported(tmp_path):
    """Its runtime exports from the evaluation model, and an import hands on what is in there."""
    model = models.two_heads()
    generate_artifacts(
        model, ["w", "trained"], ["frozen"], LossType.MSELoss, OptimType.SGD, tmp_path / "a",
        loss_input_names=["near"], target=TARGET,
    )  # fmt: skip
    graph = onnx.load(tmp_path / "a" / "eval_model.onnx").graph
    assert [value.name for value in graph.output] == ["loss"]
    assert "far" in {name for node in graph.node for name in node.output}
    import_artifacts(tmp_path / "a", tmp_path / "p")
    models.check_heads(tmp_path / "p")


def test_what_was_built_is_imported(run, tmp_path):
    """Its evaluation model returns the prediction besides the loss."""
    onnx.save(zoo.mlp((6, 5, 3)), tmp_path / "model.onnx")
    build = "build", tmp_path / "model.onnx", "--out", tmp_path / "built", "--target", TARGET
    run(*build, "--loss", "cross_entropy", code=0)
    run("import", tmp_path / "built", "--out", tmp_path / "package", code=0)
    _, module, _ = open_training(tmp_path / "package")
    loss, scores = module.eval()(np.zeros((2, 6), np.float32), np.array([0, 2]))
    assert (np.isfinite(loss), scores.shape) == (True, (2, 3))


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_an_import_knows_the_loss_that_was_built(loss, tmp_path):
    """The package is that of the forward model: labels are checked, accuracy is measured."""
    for folder, runtime in (("old", TARGET), ("plain", STOCK)):
        model = zoo.cnn(size=8, width=(4, 8))
        build_package(model, tmp_path / folder, loss=loss, runtime=runtime)
    plain = Package.open(tmp_path / "plain").manifest
    found = import_artifacts(tmp_path / "old", tmp_path / "new")
    names = ("inputs", "outputs", "evaluation_outputs", "loss", "loss_options")
    assert [getattr(found, name) for name in names] == [getattr(plain, name) for name in names]
    # A manifest of other files, or none, says nothing.
    for text in ((tmp_path / "plain" / "manifest.json").read_text(), "{}"):
        (tmp_path / "old" / "manifest.json").write_text(text)
        assert import_artifacts(tmp_path / "old", tmp_path / "again").loss == "none"
