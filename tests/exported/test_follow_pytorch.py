"""Models that PyTorch's exporters write are built as they are, and train as in PyTorch.

PyTorch runs in float64, so that what is measured is the error of the package alone.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from odtpack import optimizers
from odtpack.build import build_package
from odtpack_runtime.manifest import Manifest
from tests.exported import twins
from tests.exported.export import Exporter, export
from tests.exported.subjects import SUBJECTS, Data, Subject
from tests.packaging_tools import open_training

OPTIMIZERS: dict[str, optimizers.Optimizer] = {
    "sgd": optimizers.SGD(),
    "adamw": optimizers.AdamW(epsilon=twins.EPSILON),
}
# Seeds for which no activation comes near a kink in ten steps, see KinkMargin.
SEEDS = {("unet", "eval"): 11, ("unet", "frozen"): 3, ("unet", "train"): 19}


@pytest.mark.parametrize("default", [True, False], ids=["default-opset", "other-opset"])
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_evaluation_mode(name: str, exporter: Exporter, default: bool, tmp_path: Path) -> None:
    """What both exporters do by default: they fold transposes and batch normalizations."""
    subject = SUBJECTS[name]
    module, data, target = twins.make(subject, SEEDS.get((name, "eval"), 0))
    model = export(
        module.eval(), data, tmp_path / "model.onnx", exporter,
        opset=None if default else subject.other_opset[exporter], dynamic=subject.dynamic,
    )  # fmt: skip
    _compare(subject, twins.folded(module), data, target, model)


@pytest.mark.parametrize("name", ["bert", "causal-lm", "convnext"])
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_fresh(name: str, exporter: Exporter, tmp_path: Path) -> None:
    """Of a fresh module the exporters merge equal parameters, which train apart all the same."""
    subject = SUBJECTS[name]
    module, data, target = twins.make(subject, 0, fresh=True)
    model = export(module.eval(), data, tmp_path / "model.onnx", exporter, dynamic=subject.dynamic)
    stored = {tensor.name for tensor in onnx.load(model).graph.initializer}
    norms = {n for n, p in module.named_parameters() if "norm" in n}
    assert len(norms & stored) < len(norms)
    manifest = _compare(subject, module, data, target, model)
    assert norms <= {p.name for p in manifest.parameters if p.role == "trainable"}


@pytest.mark.parametrize("name", [name for name in SUBJECTS if SUBJECTS[name].norms])
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_frozen_norms(name: str, exporter: Exporter, tmp_path: Path) -> None:
    """Batch normalization in inference mode that is still there, its scale trained."""
    subject = SUBJECTS[name]
    module, data, target = twins.make(subject, SEEDS.get((name, "frozen"), 0))
    module = twins.frozen_norms(module)
    # Unless told to leave the graph alone, the one exporter folds in any mode.
    options = {"optimize": False} if exporter == "dynamo" else {}
    model = export(
        module, data, tmp_path / "model.onnx", exporter, dynamic=subject.dynamic, **options
    )
    manifest = _compare(subject, module, data, target, model)
    assert not [p.name for p in manifest.parameters if "running" in p.name]


@pytest.mark.parametrize("name", [name for name in SUBJECTS if SUBJECTS[name].norms])
@pytest.mark.parametrize("opset", [None, 13])
def test_training_norms(name: str, opset: int | None, tmp_path: Path) -> None:
    """Batch normalization in training mode, which only the older exporter writes."""
    subject = SUBJECTS[name]
    module, data, target = twins.make(subject, SEEDS.get((name, "train"), 0))
    model = export(
        module.train(), data, tmp_path / "model.onnx", "torchscript",
        opset=opset, dynamic=subject.dynamic,
    )  # fmt: skip
    manifest = _compare(subject, module, data, target, model)
    assert {p.role for p in manifest.parameters} == {"trainable", "state"}


def _compare(
    subject: Subject, module: nn.Module, data: Data, target: Tensor | None, model: Path
) -> Manifest:
    """Every loss, and every parameter after every step, agree with both optimizers."""
    for kind, method in OPTIMIZERS.items():
        folder = model.parent / kind
        manifest = build_package(model, folder, loss=subject.loss, optimizer=method)
        state, trainer, optimizer = open_training(folder)
        initial = {name: parameter.data.copy() for name, parameter in state.parameters}
        pairs = twins.pair(module, initial)
        trained = {pairs[p.name] for p in manifest.parameters if p.role == "trainable"}
        assert twins.parameters_of(module, trained) == {n for n, _ in module.named_parameters()}
        theirs = twins.train(copy.deepcopy(module), data, target, subject, kind)
        # The forward error in float32 is about 1e-6: nowhere do the runs take different sides.
        assert theirs.margin > 3e-6
        feeds = [tensor.numpy() for tensor in (*data.values(), target) if tensor is not None]
        optimizer.set_learning_rate(subject.rate if kind == "sgd" else twins.ADAM_RATE)
        for loss, values in zip(theirs.losses, theirs.values, strict=True):
            # Float32 carries seven digits; sums over a batch leave six.
            assert float(trainer(*feeds)) == pytest.approx(loss, rel=1e-5)
            optimizer.step()
            trainer.lazy_reset_grad()
            for name, parameter in state.parameters:
                _assert_near(parameter.data, values[pairs[name]], initial[name], name)
        # Ten steps that change nothing would agree too.
        assert theirs.losses[-1] < 0.97 * theirs.losses[0]
    return manifest


def _assert_near(ours: np.ndarray, theirs: np.ndarray, initial: np.ndarray, name: str) -> None:
    """At most a ten-thousandth of the way a tensor went, beyond a few roundings of its values."""
    error, way = np.linalg.norm(ours - theirs), np.linalg.norm(theirs - initial)
    assert error < 1e-4 * way + 1e-6 * np.linalg.norm(theirs) + 1e-7, name


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
