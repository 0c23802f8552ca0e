"""Parameters that a model reads more than once, or returns, get the gradient of PyTorch."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx.parser
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.build import build_package
from odtpack.model.loading import load_model
from odtpack_runtime.package.manifest import Manifest
from tests.model_text import LEVELS, parsed
from tests.packaging_tools import open_training

RANDOM = np.random.default_rng(7)
X = RANDOM.standard_normal((5, 4)).astype(np.float32)
TOKENS = np.array([[1, 3, 3], [0, 2, 1]])


def _values(*shape: int) -> np.ndarray:
    return (0.5 * RANDOM.standard_normal(shape)).astype(np.float32)


W, B, E = _values(4, 4), _values(4), _values(6, 4)
E[0] = 0  # as the row of a padding token is


@dataclasses.dataclass(frozen=True)
class Case:
    """A model ``text``, with the prediction ``y`` as first output, and the same in PyTorch."""

    text: str
    torch: Callable[..., Tensor]
    parameters: dict[str, np.ndarray]
    x: np.ndarray = dataclasses.field(default_factory=lambda: X)
    outputs: Sequence[str] = ()


CASES = {
    "two that have one gradient": Case(
        "(float[N, 4] x) => (float[N, 200] y) { w = Add(one, two) y = MatMul(x, w) }",
        lambda x, one, two: x @ (one + two), {"one": _values(4, 200), "two": _values(4, 200)}),
    "two nodes": Case(
        "(float[N, 4] x) => (float[N, 4] y) { h = MatMul(x, w) t = Tanh(h) y = MatMul(t, w) }",
        lambda x, w: torch.tanh(x @ w) @ w, {"w": W}),
    "three nodes of three kinds": Case(
        """(float[N, 4] x) => (float[N, 4] y) {
            h = MatMul(x, w) s = ReduceSum<keepdims = 0>(w, axis) t = Mul(h, s) d = Gemm(x, w, s)
            y = Add(t, d) }""",
        lambda x, w: (x @ w) * w.sum(0) + x @ w + w.sum(0), {"w": W, "axis": np.array([0])}),
    "one node twice": Case(
        "(float[N, 4] x) => (float[N, 4] y) { s = MatMul(w, w) y = MatMul(x, s) }",
        lambda x, w: x @ (w @ w), {"w": W}),
    "one elementwise node twice": Case(
        "(float[N, 4] x) => (float[N, 4] y) { s = Mul(b, b) y = Mul(x, s) }",
        lambda x, b: x * b * b, {"b": B}),
    "one node that takes many": Case(
        "(float[N, 4] x) => (float[N, 12] y) { c = Concat<axis = 0>(b, b, b) "
        "r = Concat<axis = 1>(x, x, x) y = Mul(r, c) }",
        lambda x, b: torch.cat([x, x, x], 1) * torch.cat([b, b, b]), {"b": B}),
    "scale and bias of one normalization": Case(
        "(float[N, 4] x) => (float[N, 4] y) { y = LayerNormalization(x, b, b) }",
        lambda x, b: F.layer_norm(x, (4,), b, b), {"b": B}),
    "a copy and the thing itself": Case(
        "(float[N, 4] x) => (float[N, 4] y) { c = Identity(w) h = MatMul(x, c) "
        "t = MatMul(h, w) d = Cast<to = 1>(w) y = MatMul(t, d) }",
        lambda x, w: x @ w @ w @ w, {"w": W}),
    "tied embedding through Transpose": Case(
        "(int64[N, 3] x) => (float[N, 3, 6] y) { h = Gather(e, x) t = Tanh(h) "
        "p = Transpose<perm = [1, 0]>(e) y = MatMul(t, p) }",
        lambda x, e: torch.tanh(F.embedding(x, e)) @ e.T, {"e": E}, TOKENS),
    "tied embedding through Gemm": Case(
        "(int64[N, 3] x) => (float[N, 6] y) { h = Gather(e, x) "
        "s = ReduceSum<keepdims = 0>(h, axis) y = Gemm<transB = 1>(s, e) }",
        lambda x, e: F.embedding(x, e).sum(1) @ e.T, {"e": E, "axis": np.array([1])}, TOKENS),
    "two lookups of one table": Case(
        "(int64[N, 3] x) => (float[N, 3, 4] y) { one = Gather(e, x) n = Neg(i) "
        "two = Gather(e, n) s = Mul(one, two) y = Add(s, b) }",
        lambda x, e, b: F.embedding(x, e) * F.embedding(torch.tensor(5), e) + b,
        {"e": E, "b": B, "i": np.array(1)}, TOKENS),
    "also an output": Case(
        "(float[N, 4] x) => (float[N, 4] y, float[4, 4] w) { h = MatMul(x, w) y = MatMul(h, w) }",
        lambda x, w: x @ w @ w, {"w": W}, outputs=("w",)),
    "a shared copy is also an output": Case(
        "(float[N, 4] x) => (float[N, 4] y, float[4, 4] c) { c = Identity(w) h = MatMul(x, c) "
        "y = MatMul(h, w) }",
        lambda x, w: x @ w @ w, {"w": W}, outputs=("c",)),
    "the prediction itself": Case(
        "(float[4] x) => (float[4] y) { z = Abs(x) }", lambda x, y: y, {"y": B}, B),
}  # fmt: skip


@pytest.mark.parametrize("level", ["off", "all"])
@pytest.mark.parametrize("case", CASES)
def test_gradients(case, level, tmp_path):
    subject = CASES[case]
    trained = {n: a for n, a in subject.parameters.items() if a.dtype == np.float32}
    generate_artifacts(
        parsed(subject.text, **subject.parameters), list(trained), loss=LossType.MSELoss,
        optimizer=OptimType.SGD, additional_output_names=list(subject.outputs),
        artifact_directory=tmp_path,
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    state, module, _ = open_training(tmp_path, options)

    tensors = {n: torch.from_numpy(a).double().requires_grad_() for n, a in trained.items()}
    x = torch.from_numpy(subject.x)
    predicted = subject.torch(x.double() if x.is_floating_point() else x, **tensors)
    target = np.ones(predicted.shape, np.float32)
    loss = F.mse_loss(predicted, torch.from_numpy(target).double())
    loss.backward()

    results = module(subject.x, target)
    first = results[0] if subject.outputs else results
    assert float(first) == pytest.approx(loss.item(), rel=1e-6)
    for name, tensor in tensors.items():
        expected = tensor.grad.numpy()
        assert np.abs(expected).max() > 1e-3
        grad = state.parameters[name].grad
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6, err_msg=name)
    for name, value in zip(subject.outputs, results[1:] if subject.outputs else (), strict=True):
        np.testing.assert_array_equal(value, W, err_msg=name)


LANGUAGE_MODEL = (
    "(int64[N, 3] x) => (float[N, 3, 6] y) { h = Gather(e, x) t = Tanh(h) y = MatMul(t, %s) }"
)


def _with_copy(copy: np.ndarray, name: str = "onnx::MatMul_7") -> onnx.ModelProto:
    return parsed(LANGUAGE_MODEL % f'"{name}"', **{"e": E, name: copy})


def test_a_folded_transpose_is_tied_again(tmp_path):
    """What PyTorch's exporters make of an embedding that is also the output projection."""
    manifest = build_package(_with_copy(E.T.copy()), tmp_path, loss="mse")
    assert _roles(manifest) == {"e": "trainable"}
    state, module, _ = open_training(tmp_path)
    target = np.ones((2, 3, 6), np.float32)
    e = torch.from_numpy(E).double().requires_grad_()
    predicted = torch.tanh(F.embedding(torch.from_numpy(TOKENS), e)) @ e.T
    loss = F.mse_loss(predicted, torch.from_numpy(target).double())
    loss.backward()
    assert float(module(TOKENS, target)) == pytest.approx(loss.item(), rel=1e-6)
    np.testing.assert_allclose(state.parameters["e"].grad, e.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["val_12", "onnx::MatMul_3"])
def test_the_copy_keeps_its_name_as_a_value(name):
    loaded = load_model(_with_copy(E.T.copy(), name))
    (node,) = [node for node in loaded.graph if node.op_type == "Transpose"]
    assert node.inputs[0] is loaded.graph.initializers["e"]
    assert node.outputs[0].name == name
    assert name not in loaded.graph.initializers


def test_what_is_no_copy_stays():
    other = E.T.copy()
    other[3, 2] += 1e-6
    for copy, name in ((other, "val_1"), (E.T.copy(), "head.weight"), (E.T * 0, "val_1")):
        assert set(load_model(_with_copy(copy, name)).graph.initializers) == {"e", name}
    # Constant matrices equal each other by chance.
    alike = parsed(LANGUAGE_MODEL % "val_1", e=E * 0 + 1, val_1=E.T * 0 + 1)
    assert set(load_model(alike).graph.initializers) == {"e", "val_1"}


def test_a_copy_that_is_named_is_a_parameter_of_its_own(tmp_path):
    """The reference trains what it is told to, tied or not."""
    model = _with_copy(E.T.copy())
    manifest = build_package(model, tmp_path / "a", loss="mse", train=["e", "onnx::MatMul_7"])
    assert _roles(manifest) == {"e": "trainable", "onnx::MatMul_7": "trainable"}
    generate_artifacts(
        model, requires_grad=["onnx::MatMul_7"], loss=LossType.MSELoss, optimizer=OptimType.SGD,
        artifact_directory=tmp_path / "b",
    )  # fmt: skip
    content = (tmp_path / "b" / "manifest.json").read_bytes()
    assert _roles(Manifest.from_json(content, "manifest.json")) == {"onnx::MatMul_7": "trainable"}


def _roles(manifest: Manifest) -> dict[str, str]:
    return {parameter.name: parameter.role for parameter in manifest.parameters}
