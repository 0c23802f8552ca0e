"""Every model that the product writes passes the ONNX checker, with full shape inference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.build import build_package
from odtpack.choices import OrtFormat
from odtpack.cli import main
from odtpack.gc_pause import _Collector, paused_collector
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


# What a build leaves to Python's cyclic garbage collector, and what it leaves alone.


class Knot:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The collector as most programs know it; the tests' own heap is frozen."""
    monkeypatch.setattr(_Collector, "frozen", False)
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@paused_collector()
def leave_a_knot() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def is_young(thing: object) -> bool:
    return any(each is thing for each in gc.get_objects(generation=0))


@pytest.mark.usefixtures("nothing_frozen")
def test_the_next_build_frees_what_one_left() -> None:
    left = leave_a_knot()
    knot = left()
    assert knot is not None
    assert not is_young(knot)
    assert gc.get_freeze_count() == 0
    del knot
    leave_a_knot()
    assert left() is None


def test_what_a_program_froze_stays_frozen() -> None:
    before = gc.get_freeze_count()
    assert before > 10_000  # by tests/conftest.py
    left = leave_a_knot()
    assert gc.get_freeze_count() == before
    gc.collect(0)  # which a young object does not survive
    assert left() is None


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(_Collector, "frozen", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 1)
    leave_a_knot()
    leave_a_knot()
    assert counted == [1]


def test_a_paused_collector_stays_paused() -> None:
    gc.disable()
    try:
        leave_a_knot()
        assert not gc.isenabled()
    finally:
        gc.enable()
