"""Ten steps of SGD on packages follow PyTorch: every loss, every parameter, every statistic.

PyTorch runs in float64, so that what is measured is the error of the package alone.
"""

import itertools
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from odtpack.build import build_package
from odtpack.model.loading import load_model
from odtpack.optimizers import SGD
from tests import zoo
from tests.autodiff.recurrent_oracle import onnx_weights
from tests.model_text import retyped
from tests.packaging_tools import batch, generate, open_training, statistic_names
from tests.sweep import split, split_rows
from tests.torch_twins import losses_of
from tests.training import runs, settled
from tests.training.tables import ROWS, WIDTH, predict, tables
from tests.training.test_execution import LEVELS

SMALL_TRANSFORMER = {"vocab": 50, "d": 32, "layers": 2, "heads": 4, "T": 16, "ff": 64}

CASES = {
    "mlp": (zoo.mlp, 64, 0.1),
    "mlp-opset12": (lambda: zoo.mlp((20, 30, 15, 10), opset=12), 16, 0.1),
    "cnn": (zoo.cnn, 8, 0.05),
    "cnn-hidden-opset13": (lambda: zoo.cnn(size=14, width=(8, 12), hidden=16, opset=13), 8, 0.1),
    **{
        f"transformer-opset{opset}":
            (partial(zoo.transformer_encoder, **SMALL_TRANSFORMER, opset=opset), 4, 0.05)
        for opset in (12, 13, 17, 21)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_small_models(case, tmp_path):
    build, size, learning_rate = CASES[case]
    model = build()
    _compare(model, batch(model, size), learning_rate, tmp_path)


@pytest.mark.parametrize(
    ("batch_norm", "size", "seed", "learning_rate"),
    # Batches for which no activation comes near a kink in ten steps, see tests.training.settled.
    split_rows([("fold", 2, 3, 0.002), ("eval", 2, 3, 0.002), ("train", 3, 10, 0.02)],
               lambda batch_norm, *_: batch_norm == "train"),
)  # fmt: skip
def test_mobilenet(batch_norm, size, seed, learning_rate, tmp_path):
    data = batch(zoo.mobilenet_v2(), size, seed)
    model = settled.mobilenet(batch_norm, data[0])
    theirs = _compare(model, data, learning_rate, tmp_path)
    # The forward error in float32 is about 1e-6: nowhere do the runs take different sides.
    assert theirs.kink_margin > 3e-6
    moved = [
        name
        for name, value in runs.initial(model).items()
        if not np.array_equal(value, theirs.values[name])
    ]
    assert any(name.endswith("running_var") for name in moved) == (batch_norm == "train")


@pytest.mark.parametrize("stages", split([3, 7], lambda stages: stages == 3))
def test_mobilenet_as_it_starts(stages, tmp_path):
    """One step from the zoo's own values, where a fair part of the activations is clipped."""
    model = zoo.mobilenet_v2(batch_norm="train", stages=stages)
    x, labels = batch(model, 8)
    generate(model, tmp_path)
    before = runs.initial(model)
    ours = runs.ours(tmp_path, x, labels, 0.01, steps=1)
    theirs = runs.pytorch(model, x, labels, 0.01, steps=1)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    # A few of eight million activations lie within rounding of a kink, and each moves elements of
    # the gradient. One percent of the step's length is ten times what was seen, and a gradient
    # that is wrong in any layer departs by more.
    step = np.concatenate([(theirs.values[n] - v).ravel() for n, v in before.items()])
    error = np.concatenate([(theirs.values[n] - ours.values[n]).ravel() for n in before])
    assert np.linalg.norm(error) < 0.01 * np.linalg.norm(step)


def _compare(model, data, learning_rate, folder):
    """Both runs agree; return PyTorch's."""
    generate(model, folder, frozen_params=statistic_names(model))
    ours = runs.ours(folder, *data, learning_rate)
    theirs = runs.pytorch(model, *data, learning_rate)
    # Ten steps that change nothing would agree too.
    assert theirs.losses[-1] < 0.9 * theirs.losses[0]
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.eval_loss == pytest.approx(theirs.eval_loss, rel=1e-5)
    assert set(ours.values) == set(theirs.values)
    initial = runs.initial(model)
    for name, value in theirs.values.items():
        # Of the way a tensor went at most a ten-thousandth, beyond ten roundings of its values.
        # (The bias of an attention's keys goes nowhere: the softmax does not see it.)
        error = np.linalg.norm(ours.values[name] - value)
        way = np.linalg.norm(value - initial[name])
        assert error < 1e-4 * way + 1e-6 * np.linalg.norm(value) + 1e-8, name
        np.testing.assert_allclose(ours.values[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    return theirs


# Recurrent classifiers, as PyTorch exports them, follow PyTorch for ten steps.

STEPS, FEATURES, CLASSES, BATCH = 20, 10, 5, 6
RATE = 0.3


class Keywords(nn.Module):
    """Which word is spoken: a recurrent layer over frames of sound, a linear one at the end."""

    def __init__(self, kind: str, *, bidirectional: bool) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(FEATURES, 16, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(16 * (1 + bidirectional), CLASSES)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        states, _ = self.rnn(frames)
        result: torch.Tensor = self.head(states.mean(1))
        return result


def export(network: nn.Module, path: Path, *, dynamo: bool) -> None:
    """Write the network; the batch, and without dynamo the length, are known when it runs."""
    sizes = {0: torch.export.Dim("batch")} if dynamo else {0: "batch", 1: "time"}
    kind = "dynamic_shapes" if dynamo else "dynamic_axes"
    with warnings.catch_warnings():  # the exporters warn about their own future
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network, (torch.randn(BATCH, STEPS, FEATURES),), path, dynamo=dynamo, verbose=False,
            input_names=["frames"], output_names=["scores"], **{kind: {"frames": sizes}},
            **({"external_data": False} if dynamo else {"opset_version": 17}),
        )  # fmt: skip


def parameters(network: Keywords) -> list[np.ndarray]:
    """Parameters of the network with the shapes that they have in ONNX."""
    head = (network.head.weight, network.head.bias)
    return [value.detach().numpy().copy() for value in (*onnx_weights(network.rnn), *head)]


@pytest.mark.parametrize(
    ("kind", "dynamo", "bidirectional"),
    # The newer exporter writes RNN out step by step.
    split_rows(
        [
            (kind, dynamo, bidirectional)
            for kind, dynamo in [("RNN", False), *itertools.product(("GRU", "LSTM"), (False, True))]
            for bidirectional in (False, True)
        ],
        lambda kind, dynamo, bidirectional: bidirectional == (kind == "LSTM") or kind == "RNN",
    ),
)
def test_ten_steps(kind, dynamo, bidirectional, tmp_path):
    if dynamo:
        pytest.importorskip("onnxscript")
    torch.manual_seed(3)
    network = Keywords(kind, bidirectional=bidirectional).eval()
    export(network, tmp_path / "model.onnx", dynamo=dynamo)
    model = onnx.load(tmp_path / "model.onnx")
    assert kind in {node.op_type for node in model.graph.node}
    initial = runs.initial(model)
    build_package(
        tmp_path / "model.onnx", tmp_path / "package", loss="cross_entropy", optimizer=SGD()
    )
    random = np.random.default_rng(0)
    x = random.standard_normal((BATCH, STEPS, FEATURES), dtype=np.float32)
    labels = random.integers(0, CLASSES, BATCH)

    ours = runs.ours(tmp_path / "package", x, labels, RATE)

    start = parameters(network)
    network.double().train()
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    data, classes = torch.from_numpy(x).double(), torch.from_numpy(labels)
    losses = losses_of(optimizer, lambda: F.cross_entropy(network(data), classes), runs.STEPS)
    assert losses[-1] < 0.9 * losses[0]
    assert ours.losses == pytest.approx(losses, rel=1e-5)
    # The exporters name W, R and B as they like: by their values they are known.
    names = [
        next(name for name, value in initial.items() if np.array_equal(value, array))
        for array in start
    ]
    assert set(ours.values) == set(names)
    for name, expected in zip(names, parameters(network), strict=True):
        np.testing.assert_allclose(ours.values[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
        assert not np.allclose(expected, initial[name], rtol=1e-3, atol=1e-4), name


# Gradients of embedding tables: right, and without zeros as large as the table.

LEAST = min(rows for rows in ROWS.values() if rows > 1000) * WIDTH * 2  # bytes in float16


def _graph_size(model: Path, level: str, folder: Path, kind: str) -> int:
    """Bytes of what a session executes."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "optimized")
    options.add_session_config_entry("session.save_model_format", kind)
    onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return (folder / "optimized").stat().st_size


@pytest.mark.parametrize("form", ["float32", "float16", "float64", "opset 13"])
def test_no_session_holds_zeros(form, tmp_path):
    """Neither the file nor what ONNX Runtime makes of it grows with the tables."""
    model = tables(13 if form == "opset 13" else 17)
    if form in ("float16", "float64"):
        model = retyped(model, np.dtype(form).type)
    training = generate(model, tmp_path) / "training_model.onnx"
    assert training.stat().st_size < LEAST / 2
    for level, kind in itertools.product(LEVELS, ("ONNX", "ORT")):
        assert _graph_size(training, level, tmp_path, kind) < LEAST, (level, kind)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_pytorchs(level, threads, tmp_path):
    """Of one batch, and of three that are added up, twice over."""
    model = tables()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.intra_op_num_threads = threads
    state, module, _ = open_training(generate(model, tmp_path), options)
    for first in (0, 3):
        tensors = {
            name: torch.from_numpy(p.data.copy()).double().requires_grad_()
            for name, p in state.parameters
        }
        for seed in range(first, first + 3):
            tokens, labels = batch(model, 40, seed)
            loss = F.cross_entropy(
                predict(torch.from_numpy(tokens), tensors), torch.from_numpy(labels)
            )
            loss.backward()
            assert float(module(tokens, labels)) == pytest.approx(loss.item(), rel=1e-5)
            for name, parameter in state.parameters:
                expected = tensors[name].grad.numpy()
                atol = 1e-6 * np.abs(expected).max()
                np.testing.assert_allclose(
                    parameter.grad, expected, rtol=1e-4, atol=atol, err_msg=name
                )
                # What no token meant is zero, not nearly.
                if name != "tied.embed":
                    assert not parameter.grad[expected == 0].any(), name
        module.lazy_reset_grad()


def test_float16(tmp_path):
    """The same in a model of float16 numbers, each right to 2^-11 and sums to a few times that."""
    model = retyped(tables(), np.float16)
    state, module, _ = open_training(generate(model, tmp_path))
    tensors = {
        name: torch.from_numpy(p.data.astype(np.float16)).double().requires_grad_()
        for name, p in state.parameters
    }
    for seed in range(3):
        tokens, labels = batch(model, 40, seed)
        logits = predict(torch.from_numpy(tokens), tensors)
        F.cross_entropy(logits, torch.from_numpy(labels)).backward()
        module(tokens, labels)
        for name, parameter in state.parameters:
            expected = tensors[name].grad.numpy()
            assert parameter.grad.dtype == np.float32
            error = np.linalg.norm(parameter.grad - expected)
            assert error < 2e-3 * np.linalg.norm(expected), name


def test_how_each_table_accumulates(tmp_path):
    """Each in the way that the model was made for: the other tests rely on it."""
    graph = load_model(onnx.load(generate(tables(), tmp_path) / "training_model.onnx")).graph
    found = {}
    for node in graph:
        if node.op_type == "If":
            name = str(node.outputs[0].name).removesuffix("_grad.accumulation.out")
            found[name] = [
                [inner.op_type for inner in node.attributes[branch].as_graph()]
                for branch in ("then_branch", "else_branch")
            ]
    for name, (fresh, added) in found.items():
        scattered = name not in ("tied.embed", "scaled.embed")
        assert (added[-1] == "ScatterElements") == scattered, name
        assert (fresh[-1] == "Gather") == (name in ("large.embed", "twice.embed")), name
    assert set(found) == set(ROWS)
    # Onto the gradient of the head, onto zeros for the table that is scaled, and onto zeros of
    # the size of the batch, of which the loss makes its gradient.
    outside = [node for node in graph if node.op_type == "ScatterElements"]
    starts = sorted(node.inputs[0].producer().op_type for node in outside)
    assert starts == ["ConstantOfShape", "Expand", "Gemm"]
