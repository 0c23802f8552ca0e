"""Models that PyTorch's exporters write are built as they are, and train as in PyTorch."""

from __future__ import annotations

import itertools
from pathlib import Path

import onnx
import pytest

from tests.exported import twins
from tests.exported.compare import assert_follows
from tests.exported.export import Exporter, export
from tests.exported.subjects import SUBJECTS
from tests.sweep import split, split_rows

# Seeds for which no activation comes near a kink in ten steps, see KinkMargin.
SEEDS = {("unet", "eval"): 11, ("unet", "frozen"): 3, ("unet", "train"): 19}


# Of each subject one exporter at its default opset; the two take turns.
EXPORTS = [
    pytest.param(
        name, exporter, default,
        id=f"{name}-{exporter}-{'default' if default else 'other'}-opset",
        marks=[] if default and turn == number % 2 else [pytest.mark.sweep],
    )
    for number, name in enumerate(SUBJECTS)
    for turn, exporter in enumerate(("torchscript", "dynamo"))
    for default in (True, False)
]  # fmt: skip
NORMED = [name for name in SUBJECTS if SUBJECTS[name].norms]


@pytest.mark.parametrize(("name", "exporter", "default"), EXPORTS)
def test_evaluation_mode(name: str, exporter: Exporter, default: bool, tmp_path: Path) -> None:
    """What both exporters do by default: they fold transposes and batch normalizations."""
    subject = SUBJECTS[name]
    module, data, target = twins.make(subject, SEEDS.get((name, "eval"), 0))
    model = export(
        module.eval(), data, tmp_path / "model.onnx", exporter,
        opset=None if default else subject.other_opset[exporter], dynamic=subject.dynamic,
    )  # fmt: skip
    assert_follows(subject, twins.folded(module), data, target, model, tmp_path)


@pytest.mark.parametrize(
    "name", split(["bert", "causal-lm", "convnext"], lambda name: name == "convnext")
)
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_fresh(name: str, exporter: Exporter, tmp_path: Path) -> None:
    """Of a fresh module the exporters merge equal parameters, which train apart all the same."""
    subject = SUBJECTS[name]
    module, data, target = twins.make(subject, 0, fresh=True)
    model = export(module.eval(), data, tmp_path / "model.onnx", exporter, dynamic=subject.dynamic)
    stored = {tensor.name for tensor in onnx.load(model).graph.initializer}
    norms = {n for n, p in module.named_parameters() if "norm" in n}
    assert len(norms & stored) < len(norms)
    manifest = assert_follows(subject, module, data, target, model, tmp_path)
    assert norms <= {p.name for p in manifest.parameters if p.role == "trainable"}


@pytest.mark.parametrize(
    ("exporter", "name"),
    split_rows(itertools.product(("torchscript", "dynamo"), NORMED), lambda _, n: n == NORMED[0]),
)
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
    manifest = assert_follows(subject, module, data, target, model, tmp_path)
    assert not [p.name for p in manifest.parameters if "running" in p.name]


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("opset", split([None, 13], lambda opset: opset is None))
def test_training_norms(name: str, opset: int | None, tmp_path: Path) -> None:
    """Batch normalization in training mode, which only the older exporter writes."""
    subject = SUBJECTS[name]
    module, data, target = twins.make(subject, SEEDS.get((name, "train"), 0))
    model = export(
        module.train(), data, tmp_path / "model.onnx", "torchscript",
        opset=opset, dynamic=subject.dynamic,
    )  # fmt: skip
    manifest = assert_follows(subject, module, data, target, model, tmp_path)
    assert {p.role for p in manifest.parameters} == {"trainable", "state"}
