"""``odtpack import`` of what are not artifacts, or not of one model: one error, nothing written."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from odtpack.build import build_package
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.cli.conftest import assert_refused
from tests.ort_training import models
from tests.packaging_tools import open_training
from tests.refused import refused

Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts with the reference's operators, without the reference: our own for it."""
    folder = tmp_path_factory.mktemp("made")
    build_package(
        models.small(ratio=0.3), folder / "a", loss="cross_entropy", train=models.TRAINED,
        outputs=["y"], runtime="ort-training",
    )  # fmt: skip
    (folder / "a" / "manifest.json").unlink()
    return folder / "a"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "artifacts")
    return tmp_path / "artifacts"


def edit(path: Path, change: Callable[[onnx.GraphProto], Any]) -> None:
    model = onnx.load(path)
    change(model.graph)
    if "com.microsoft" not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, path)


def rewrite(folder: Path, change: Callable[[CheckpointData], CheckpointData]) -> None:
    write_checkpoint(folder / "checkpoint", change(read_checkpoint(folder / "checkpoint")))


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def node(graph: onnx.GraphProto, op_type: str) -> onnx.NodeProto:
    return next(item for item in graph.node if item.op_type == op_type)


def read_as(graph: onnx.GraphProto, old: str, new: str) -> None:
    for item in graph.node:
        item.input[:] = [new if name == old else name for name in item.input]


def other_name(graph: onnx.GraphProto) -> None:
    node(graph, "Dropout").output[0] = "elsewhere"
    read_as(graph, "d", "elsewhere")


def rename_input(graph: onnx.GraphProto) -> None:
    graph.input[0].name = "image"
    read_as(graph, "x", "image")


def spoil_text(graph: onnx.GraphProto) -> None:
    """As one flipped byte does."""
    wrong = onnx.helper.make_attribute("auto_pad", b"NOTSE\xff")
    node(graph, "Conv").attribute.append(wrong)


def replace_relu(op_type: str) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        item = node(graph, "Relu")
        item.op_type, item.domain = op_type, "com.microsoft"

    return change


def adam_mode(graph: onnx.GraphProto) -> None:
    for attribute in graph.node[0].attribute:
        if attribute.name == "adam_mode":
            attribute.i = 7


def plain(folder: Path) -> None:
    build_package(models.small(), folder.with_name("own"), loss="cross_entropy")
    shutil.copy(folder.with_name("own") / "training_model.onnx", folder)


def without_reset(graph: onnx.GraphProto) -> None:
    graph.input.remove(next(item for item in graph.input if item.name == "lazy_reset_grad"))


def with_moments(count: int, *, whole: bool = True) -> Callable[[CheckpointData], Any]:
    def change(data: CheckpointData) -> CheckpointData:
        moments = {
            name: [np.ones(array.shape if whole else [1] * array.ndim, np.float32)] * count
            for name, array in data.trainable.items()
        }
        return dataclasses.replace(data, optimizer=OptimizerState(3, 0.1, moments))

    return change


def lose_one(data: CheckpointData, **more: Any) -> CheckpointData:
    trainable = {name: array for name, array in data.trainable.items() if name != "fc_bias"}
    return dataclasses.replace(data, trainable=trainable, **more)


def freeze_one(data: CheckpointData) -> CheckpointData:
    return lose_one(data, frozen=data.frozen | {"fc_bias": data.trainable["fc_bias"]})


def put(place: str, **arrays: np.ndarray) -> Callable[[CheckpointData], CheckpointData]:
    return lambda data: dataclasses.replace(data, **{place: getattr(data, place) | arrays})


def nominal(data: CheckpointData) -> CheckpointData:
    return CheckpointData(
        {name: np.empty(0, array.dtype) for name, array in data.trainable.items()},
        {name: np.empty(0, array.dtype) for name, array in data.frozen.items()},
        nominal=True,
    )


TRAINING, EVAL, OPTIMIZER = (f"{n}_model.onnx" for n in ("training", "eval", "optimizer"))


def in_model(name: str, change: Callable[[onnx.GraphProto], Any]) -> Change:
    return lambda folder: edit(folder / name, change)


def in_checkpoint(change: Callable[[CheckpointData], CheckpointData]) -> Change:
    return lambda folder: rewrite(folder, change)


def overwrite(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


BAD: dict[str, tuple[Change, str, str]] = {
    "no-training-model": (remove(TRAINING), "artifacts-not-found", TRAINING),
    "no-eval-model": (remove(EVAL), "artifacts-incomplete", EVAL),
    "no-optimizer": (remove(OPTIMIZER), "artifacts-incomplete", OPTIMIZER),
    "no-checkpoint": (remove("checkpoint"), "artifacts-incomplete", "--checkpoint"),
    "two-models": (lambda folder: shutil.copy(folder / TRAINING, folder / f"b_{TRAINING}"),
                   "artifacts-ambiguous", "'b_'"),
    "garbage-model": (overwrite(EVAL, b"\x00\xff garbage"), "not-onnx", EVAL),
    "garbage-optimizer": (overwrite(OPTIMIZER, b""), "not-onnx", OPTIMIZER),
    "garbage-checkpoint": (overwrite("checkpoint", b"garbage" * 20), "checkpoint-corrupt",
                           "checkpoint"),
    "name-not-text": (
        lambda folder: (folder / TRAINING).write_bytes(
            (folder / TRAINING).read_bytes().replace(b"lazy_reset_grad", b"lazy_reset_gra\xff")
        ),
        "invalid-model",
        "UTF-8",
    ),
    "forward-model": (lambda folder: shutil.copy(folder / EVAL, folder / TRAINING),
                      "nothing-to-train", "no gradients"),
    "our-package": (plain, "not-artifacts", "package already"),
    "no-reset": (in_model(TRAINING, without_reset), "not-artifacts", "1.19"),
    "other-inputs": (in_model(EVAL, rename_input), "artifacts-mixed", "inputs"),
    "other-outputs": (in_model(EVAL, lambda g: g.output.pop()), "artifacts-mixed", "outputs"),
    "other-dropout": (in_model(EVAL, other_name), "artifacts-mixed", "'d'"),
    "unknown-optimizer": (in_model(OPTIMIZER,
                                   lambda g: setattr(g.node[0], "op_type", "LambOptimizer")),
                          "unknown-optimizer", "LambOptimizer"),
    "unknown-adam": (in_model(OPTIMIZER, adam_mode), "unknown-optimizer", "adam_mode 7"),
    "parameter-missing": (in_checkpoint(lose_one), "checkpoint-mismatch", "'fc_bias'"),
    "parameter-more": (in_checkpoint(put("frozen", more=np.ones(2, np.float32))),
                       "checkpoint-mismatch", "'more'"),
    "parameter-shape": (in_checkpoint(put("trainable", fc_bias=np.ones(4, np.float32))),
                        "checkpoint-mismatch", "[4]"),
    "parameter-frozen": (in_checkpoint(freeze_one), "checkpoint-mismatch", "freezes"),
    "nominal": (in_checkpoint(nominal), "checkpoint-nominal", "--checkpoint"),
    "one-moment": (in_checkpoint(with_moments(1)), "optimizer-mismatch", "adamw"),
    "moment-shape": (in_checkpoint(with_moments(2, whole=False)), "optimizer-mismatch", "adamw"),
    "unknown-operator": (in_model(EVAL, replace_relu("Nonsense")), "", "Nonsense"),
    "text-attribute": (in_model(EVAL, spoil_text), "invalid-model", "not UTF-8"),
    "grad-operator": (in_model(EVAL, replace_relu("ReluGrad")), "", "ReluGrad"),
}  # fmt: skip


def test_the_artifacts_are_good_as_they_are(run, folder):
    done = run("import", folder, "--out", folder.with_name("package"), "--json", code=0)
    manifest = done.json()
    assert [p["name"] for p in manifest["parameters"] if p["role"] == "state"] == models.STATISTICS


def test_an_output_that_is_named_twice_is_returned_once(run, folder):
    """The reference writes such artifacts where an additional output is one of the model's."""
    for name in (TRAINING, EVAL):
        edit(folder / name, lambda graph: graph.output.insert(2, graph.output[1]))
    done = run("import", folder, "--out", folder.with_name("package"), "--json", code=0)
    assert [output["name"] for output in done.json()["outputs"]] == ["loss", "y"]
    assert "the artifacts return 'y' twice" in done.err


@pytest.mark.parametrize("name", BAD)
def test_bad_artifacts(name, run, folder):
    change, code, words = BAD[name]
    change(folder)
    outcome = run("import", folder, "--out", folder.with_name("package"))
    assert "error[internal]" not in outcome.err
    code = code or outcome.err.partition("error[")[2].partition("]")[0]
    assert_refused(outcome, code, words)
    assert not folder.with_name("package").exists()


def test_opened_as_a_package_they_are_to_be_imported(folder, tmp_path):
    build_package(models.small(), tmp_path / "p", loss="cross_entropy", train=models.TRAINED)
    _, module, _ = open_training(tmp_path / "p")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    opened: list[tuple[str, Callable[[], Any]]] = [
        ("model-not-loadable", lambda: Module(folder / "training_model.onnx", state)),
        ("model-not-loadable", lambda: Optimizer(folder / "optimizer_model.onnx", module)),
        ("package-not-found", lambda: Package.open(folder)),
    ]
    for code, open_them in opened:
        with refused(code, hint=f"odtpack import {folder} --out package"):
            open_them()


def test_no_folder(run, tmp_path):
    onnx.save(zoo.mlp((6, 8, 4)), tmp_path / "model.onnx")
    for given in (tmp_path / "nothing", tmp_path / "model.onnx", tmp_path):
        assert_refused(run("import", given, "--out", tmp_path / "p"), "artifacts-not-found")


def test_checkpoints_that_are_missing_or_of_another_model(run, folder, tmp_path):
    build_package(zoo.mlp((6, 8, 4)), tmp_path / "mlp", loss="cross_entropy")
    command = ("import", folder, "--out", tmp_path / "p", "--checkpoint")
    assert_refused(
        run(*command, tmp_path / "mlp" / "checkpoint"), "checkpoint-mismatch", "'bn_bias'"
    )
    assert_refused(run(*command, tmp_path / "none.ckpt"), "artifacts-incomplete", "none.ckpt")


def test_the_destination_is_not_the_source(run, folder):
    before = sorted(folder.iterdir())
    assert_refused(run("import", folder, "--out", folder), "folder-not-empty")
    assert sorted(folder.iterdir()) == before
