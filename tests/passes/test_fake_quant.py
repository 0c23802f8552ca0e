"""Simulated quantization against its formulas in numpy, and PyTorch's fake quantization."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

from odtpack.autodiff import differentiate
from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.graph.graphs import Ops
from odtpack.losses import make_loss
from odtpack.model.loading import load_model
from odtpack.package.candidates import resolve
from odtpack.package.task import Task
from odtpack.package.training import build_graphs
from odtpack.passes import patterns
from tests.autodiff.oracle import add_gradients
from tests.model_text import parsed
from tests.passes.tools import op_types, outline, parse, run

X = np.linspace(-3, 3, 24, dtype=np.float32)[np.random.default_rng(0).permutation(24)].reshape(3, 8)
SEED = np.random.default_rng(1).standard_normal((3, 8), dtype=np.float32)
BOUNDS = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535)}


def pair(dtype, shape, attributes="", opset=17, zero=True, body=""):
    """A pair with its parameters as inputs."""
    names = "s, z" if zero else "s"
    body = body or (
        f"q = QuantizeLinear{attributes}(x, {names}) y = DequantizeLinear{attributes}(q, {names})"
    )
    inputs = f"float[3, 8] x, float{shape} s, {dtype}{shape} z"
    return parse(f"g ({inputs}) => (float[3, 8] y) {{ {body} }}", opset, domains=[INTERNAL_DOMAIN])


def gradients(model: ir.Model, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """y, and the cotangents of x and of the scale."""
    patterns.mark_fake_quant(model.graph)
    assert "FakeQuant" in op_types(model.graph)
    model, names = add_gradients(
        model, ["x", "s"], after=lambda _, graph: patterns.lower_fake_quant(graph)
    )
    assert "FakeQuant" not in op_types(model.graph)
    model.graph.opset_imports.pop(INTERNAL_DOMAIN, None)
    found = run(model, feeds | {"seed_y": SEED})
    return found["y"], found[names["x"]], found[names["s"]]


@pytest.mark.parametrize(("opset", "dtype", "axis", "block"), [
    (12, "uint8", None, 0), (17, "uint8", None, 0), (17, "int8", None, 0), (17, "int8", 1, 0),
    (13, "uint8", 0, 0), (21, "uint16", 0, 0), (21, "int8", 1, 4), (21, "int8", 1, 3),
    (24, "int8", 1, 4), (25, "int8", None, 0),
])  # fmt: skip
def test_gradients_are_those_of_the_straight_through_estimator(opset, dtype, axis, block):
    shape = () if axis is None else (3, -(-8 // block)) if block else (X.shape[axis],)
    spread = np.linspace(0.008, 0.02, max(1, int(np.prod(shape))), dtype=np.float32)
    scale = np.asarray(spread.reshape(shape) / np.float32(50 if dtype == "uint16" else 1))
    zero = np.full(shape, 100 if dtype == "uint8" else 3000 if dtype == "uint16" else 3, dtype)
    blocks = f", block_size = {block}" if block else ""
    attributes = "" if axis is None else f"<axis = {axis}{blocks}>"
    model = pair(dtype, "" if axis is None else str(list(shape)), attributes, opset)
    y, dx, dscale = gradients(model, {"x": X, "s": scale, "z": zero})

    if axis is not None:
        wide = np.repeat(scale, block, 1)[:, :8] if block else np.expand_dims(scale, 1 - axis)
    else:
        wide = scale
    low, high = BOUNDS[dtype]
    start = float(zero.flat[0])
    levels = np.round(X.astype(np.float64) / wide) + start
    inside = (levels >= low) & (levels <= high)
    assert 0.3 < inside.mean() < 0.95
    expected = (np.clip(levels, low, high) - start) * wide
    slope = SEED * (expected - inside * X) / wide
    if axis is None:
        total = slope.sum()
    elif block:
        total = np.stack([slope[:, i : i + block].sum(1) for i in range(0, 8, block)], 1)
    else:
        total = slope.sum(1 - axis)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_array_equal(dx, SEED * inside)
    np.testing.assert_allclose(dscale, total, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_pytorch():
    x = torch.tensor(X, requires_grad=True)
    scale = torch.tensor([0.015], requires_grad=True)
    y = torch._fake_quantize_learnable_per_tensor_affine(x, scale, torch.tensor([3.0]), -128, 127)
    y.backward(torch.tensor(SEED))
    feeds = {"x": X, "s": np.asarray(0.015, np.float32), "z": np.array(3, np.int8)}
    found = gradients(pair("int8", ""), feeds)
    for ours, theirs in zip(found, (y.detach(), x.grad, scale.grad), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy().reshape(ours.shape), rtol=1e-5, atol=1e-5)


def test_without_zero_point_it_is_zero():
    feeds = {"x": X, "s": np.asarray(0.01, np.float32), "z": np.array(0, np.uint8)}
    _, dx, _ = gradients(pair("uint8", "", zero=False), feeds)
    np.testing.assert_array_equal(dx, SEED * (np.round(X / np.float32(0.01)) >= 0) * (X < 2.555))


def test_lowering_restores_the_model():
    model = pair("int8", "[8]", "<axis = 1>")
    before = outline(model)
    patterns.mark_fake_quant(model.graph)
    assert outline(model) != before
    patterns.lower_fake_quant(model.graph)
    assert outline(model) == before


@pytest.mark.parametrize("body", [
    "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, t, z)",
    "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s)",
    "q = QuantizeLinear<axis = 0>(x, s, z) y = DequantizeLinear(q, s, z)",
    "q = Cast<to = 3>(x) y = DequantizeLinear(q, s, z)",
])  # fmt: skip
def test_what_is_no_pair_stays_and_lets_no_gradient_through(body):
    model = pair("int8", "", body=f"t = Add(s, s) {body}")
    before = outline(model)
    patterns.mark_fake_quant(model.graph)
    assert outline(model) == before
    graph = model.graph
    op, y = Ops(graph), graph.outputs[0]
    assert differentiate(graph, {y: op.constant(SEED)}, [graph.inputs[0]], op) == {}


def test_a_model_with_simulated_quantization_trains_through_it():
    """Weights before a pair are parameters, and the emitted model still rounds."""
    text = """g (float[n, 4] x) => (float[n, 2] y)
    <float[4, 2] w = {0.31, -0.52, 0.11, 0.97, -0.44, 0.05, 5.0, -0.73},
     float s = {0.03}, int8 z = {0}>
    { q = QuantizeLinear(w, s, z) r = DequantizeLinear(q, s, z) y = MatMul(x, r) }"""
    model = load_model(parsed(text))
    assert resolve(model, (), ()) == (("w",), ())
    training = build_graphs(Task(model, ("w",), (), make_loss("mse"))).training
    assert {node.domain for node in training.graph} == {""}
    assert {"QuantizeLinear", "DequantizeLinear"} <= set(op_types(training.graph))
    w = model.graph.initializers["w"].const_value.numpy()
    x, target = X[:, :4], X[:, 4:6]
    found = run(training, {
        "x": x, "target": target, "w": w, "w_grad.accumulation.buffer": np.zeros_like(w),
        "lazy_reset_grad": np.array([True]),
    })  # fmt: skip
    rounded = torch.fake_quantize_per_tensor_affine(
        weight := torch.tensor(w, requires_grad=True), 0.03, 0, -128, 127
    )
    loss = torch.nn.functional.mse_loss(torch.tensor(x) @ rounded, torch.tensor(target))
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.detach(), rtol=1e-5)
    np.testing.assert_allclose(found["w_grad.accumulation.out"], weight.grad, rtol=1e-4, atol=1e-6)
    assert weight.grad[3, 0] == 0  # 5.0 is beyond what 127 levels of 0.03 reach
