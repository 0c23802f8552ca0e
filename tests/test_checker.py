"""Every model that the product writes passes the ONNX checker, with full shape inference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.build import build_package
from odtpack.choices import OrtFormat
from odtpack.cli import main
from odtpack_runtime import CheckpointState, Package
from odtpack_runtime.package.inference_template import write_inference_model
from tests import zoo
from tests.exported.export import export
from tests.packaging_tools import open_training, trainable_names


def _exported(exporter: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(40, 3),
        ).eval()
        return export(module, {"x": torch.randn(2, 5, 8)}, folder / "model.onnx", exporter)

    return write


def _zoo(folder: Path) -> Path:
    onnx.save(zoo.mlp(), folder / "model.onnx")
    return folder / "model.onnx"


MODELS = {"torchscript": _exported("torchscript"), "dynamo": _exported("dynamo"), "zoo": _zoo}
STEP_MODELS = {"zoo": {"step_model.onnx"}}
"""The model with 2^18 trained elements has a step model."""


def _check(folder: Path) -> set[str]:
    template = folder / "inference_template.onnx"  # a model once its parameters are appended
    paths = sorted(set(folder.glob("*.onnx")) - {template})
    for path in paths:
        onnx.checker.check_model(str(path), full_check=True)
    return {path.name for path in paths}


@pytest.mark.parametrize("name", MODELS)
def test_packages_and_exported_models(name: str, tmp_path: Path) -> None:
    model, package = MODELS[name](tmp_path), tmp_path / "package"
    build_package(model, package, loss="cross_entropy", ort_format=OrtFormat(), frozen_storage=None)
    output = onnx.load(model).graph.output[0].name
    _, module, _ = open_training(package)
    module.export_model_for_inferencing(package / "inference.onnx", [output])
    assert main(["export", str(package), "--out", str(package / "by_command.onnx")]) == 0
    opened = Package.open(package)
    parameters = CheckpointState.load_checkpoint(opened.checkpoint).parameters
    write_inference_model(
        opened, {name: each.data for name, each in parameters}, package / "completed.onnx"
    )
    assert _check(package) == {
        "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "inference.onnx",
        "by_command.onnx", "completed.onnx", *STEP_MODELS.get(name, ()),
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_artifacts(name: str, tmp_path: Path) -> None:
    model, folder = MODELS[name](tmp_path), tmp_path / "artifacts"
    proto = onnx.load(model)
    names = trainable_names(proto) if name == "zoo" else ["*"]
    generate_artifacts(
        model, requires_grad=names, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        artifact_directory=folder,
    )  # fmt: skip
    models = {"training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"}
    assert _check(folder) == models | STEP_MODELS.get(name, set())
