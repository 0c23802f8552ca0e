"""Models that PyTorch's exporters write are built as they are, and train as in PyTorch."""

import io
import itertools
import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from odtpack.build import build_package
from odtpack.model.loading import load_model
from tests.exported import twins
from tests.exported.compare import assert_follows
from tests.exported.export import export
from tests.exported.subjects import SUBJECTS, Data
from tests.model_text import parsed, run
from tests.refused import refused
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
def test_evaluation_mode(name, exporter, default, tmp_path):
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
def test_fresh(name, exporter, tmp_path):
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
def test_frozen_norms(name, exporter, tmp_path):
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
def test_training_norms(name, opset, tmp_path):
    """Batch normalization in training mode, which only the older exporter writes."""
    subject = SUBJECTS[name]
    module, data, target = twins.make(subject, SEEDS.get((name, "train"), 0))
    model = export(
        module.train(), data, tmp_path / "model.onnx", "torchscript",
        opset=opset, dynamic=subject.dynamic,
    )  # fmt: skip
    manifest = assert_follows(subject, module, data, target, model, tmp_path)
    assert {p.role for p in manifest.parameters} == {"trainable", "state"}


# The forms in which an export reaches the packager, and the options that change its shape.

SUBJECT = SUBJECTS["padding-mask"]


Made = tuple[nn.Module, Data, Tensor | None]


@pytest.fixture
def made() -> Made:
    module, data, target = twins.make(SUBJECT, 0)
    return module.eval(), data, target


@pytest.mark.parametrize(("exporter", "options"), [
    ("torchscript", {"keep_initializers_as_inputs": True}),
    ("torchscript", {"do_constant_folding": False}),
    ("dynamo", {"keep_initializers_as_inputs": True}),
    ("dynamo", {"optimize": False}),
    ("dynamo", {"external_data": False}),
])  # fmt: skip
def test_options(made, exporter, options, tmp_path):
    module, data, target = made
    model = export(
        module, data, tmp_path / "model.onnx", exporter, dynamic=SUBJECT.dynamic, **options
    )
    manifest = assert_follows(SUBJECT, module, data, target, model, tmp_path)
    # Parameters that the file offers as inputs are none that the application feeds.
    assert [value.name for value in manifest.inputs] == [*data, "labels"]


@pytest.mark.parametrize("form", ["model", "model_proto"])
def test_a_program_in_memory(made, form, tmp_path):
    """What torch.onnx.export returns, whose initializers are the module's own tensors."""
    module, data, target = made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, tuple(data.values()), dynamo=True, verbose=False)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    assert_follows(SUBJECT, module, data, target, getattr(program, form), tmp_path)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_stream(made, tmp_path):
    module, data, target = made
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, tuple(data.values()), stream, dynamo=False)
    model = onnx.load_from_string(stream.getvalue())
    assert_follows(SUBJECT, module, data, target, model, tmp_path)


def test_external_data(made, tmp_path):
    """As the newer exporter writes models by default, and larger ones always."""
    module, data, target = made
    model = export(module, data, tmp_path / "model.onnx", "dynamo", external_data=True)
    stored = onnx.load(model, load_external_data=False)
    assert any(tensor.external_data for tensor in stored.graph.initializer)
    assert_follows(SUBJECT, module, data, target, model, tmp_path)


# Models of opsets from 7 to 11 are converted, keep their names and train as in PyTorch.

NAMES = ["keyword-gru", "lstm", "mobilenet-v3", "bert", "recommender", "siamese", "translator",
         "window-transformer"]  # fmt: skip


@pytest.mark.parametrize("name", split(NAMES, lambda name: name == "siamese"))
@pytest.mark.parametrize("opset", [9, 11])
def test_an_old_export_trains_as_in_pytorch(name, opset, tmp_path):
    subject = SUBJECTS[name]
    module, data, target = twins.make(subject, 0)
    model = export(
        module.eval(), data, tmp_path / "model.onnx", "torchscript",
        opset=opset, dynamic=subject.dynamic,
    )  # fmt: skip
    assert onnx.load(model).opset_import[0].version == opset
    assert_follows(subject, twins.folded(module), data, target, model, tmp_path)


def test_opset_7_keeps_its_names_and_is_said(tmp_path):
    """Upsample and the broadcasts of opset 7; weights are inputs, as IR version 3 asks for."""
    text = """
    net (float[N, 1, 4, 4] x, float[2, 1, 3, 3] w, float[2] b)
        => (float[N, 2, 4, 4] y, float[N, 2, 4, 4] u)
    { c = Conv(x, w, b) u = Upsample<scales = [1.0, 1.0, 2.0, 2.0]>(c) y = Softmax<axis = 3>(u) }"""
    values = np.arange(18, dtype=np.float32) / 10
    model = parsed(text, 7, ir_version=3, w=values.reshape(2, 1, 3, 3), b=values[:2])
    graph = load_model(model).graph
    assert graph.opset_imports[""] == 17
    assert [value.name for value in graph.inputs] == ["x"]
    assert {"c", "u", "y"} <= {value.name for node in graph for value in node.outputs}
    said: list[str] = []
    manifest = build_package(model, tmp_path / "package", loss="mse", remark=said.append)
    assert [parameter.name for parameter in manifest.parameters] == ["w", "b"]
    assert said[0] == "the model has opset 7, and is converted to 17"


@pytest.mark.parametrize(("opset", "net"), [
    *((10, f'Resize<mode = "{mode}">(x, {scales})')
          for mode in ("nearest", "linear") for scales in ("grow", "shrink")),
    *((9, f'Upsample<mode = "{mode}">(x, grow)') for mode in ("nearest", "linear")),
    (7, "Upsample<scales = [1.0, 1.0, 1.5, 2.5]>(x)"),
    (10, "Hardmax(x)"),
    (11, "Hardmax<axis = -2>(x)"),
    (11, "Hardmax<axis = 3>(x)"),
])  # fmt: skip
def test_an_old_model_computes_the_same(opset, net):
    text = f"""net (float[2, 3, 10, 8] x) => (float[2, 3, H, W] y)
        <float[4] grow = {{1, 1, 1.5, 2.5}}, float[4] shrink = {{1, 1, 0.6, 0.3}}>
        {{ y = {net} }}"""
    model = parsed(text, opset, ir_version=5)
    x = np.random.default_rng(0).standard_normal((2, 3, 10, 8)).astype(np.float32)
    found = (run(each, {"x": x})["y"] for each in (model, load_model(model)))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("scales", "why"), [("both", "shrinks one axis and enlarges"), ("s", "known only when")]
)
def test_what_an_old_resize_reads_is_not_guessed(scales, why):
    text = f"""net (float[1, 1, 4, 4] x, float[4] s) => (float[1, 1, H, W] y)
        <float[4] both = {{1, 1, 0.5, 2}}> {{ y = Resize(x, {scales}) }}"""
    with refused("opset-too-old", why):
        load_model(parsed(text, 10, ir_version=5))


def test_what_the_converter_refuses():
    text = """net (float[N, 2, 4, 4] x, float[2] s) => (float[N, 2, 4, 4] y)
        { y = BatchNormalization<spatial = 0>(x, s, s, s, s) }"""
    with refused("opset-too-old", "opset 7, and converting it to 17 fails: Attr"):
        load_model(parsed(text, 7, ir_version=4))
