"""What ``quantize_dynamic`` writes: the kernels' values, and the gradient of the numbers behind."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch.nn import functional as F

from odtpack.autodiff.backward import REASON
from odtpack.build import build_package
from odtpack.model.loading import load_model
from odtpack.passes import pipeline
from tests.autodiff.oracle import Array, add_gradients, normal, run, session
from tests.model_text import parsed

T, B, D, H = 5, 3, 6, 4  # steps, samples, inputs, hidden units
X, FIRST = normal(B, D, seed=1), normal(D, D, seed=2)
Weights = dict[str, torch.Tensor]


# Of each kind a model, and its weights.
KINDS: dict[str, tuple[str, dict[str, Array]]] = {
    "MatMul": (f"g (float[n, {D}] x) => (float[n, {H}] y)"
               " { a = MatMul(x, first) h = Tanh(a) p = MatMul(h, w) y = Add(p, b) }",
               {"w": normal(D, H, seed=3), "b": normal(H, seed=4), "first": FIRST}),
    "Conv": (f"g (float[n, {D}] x) => (float[n, {H}, m] y) <int64[3] shape = {{0, 2, 3}}> {{"
             " a = MatMul(x, first) s = Reshape(a, shape) h = Tanh(s)"
             " y = Conv<pads = [1, 0]>(h, w, b) }",
             {"w": normal(H, 2, 2, seed=3), "b": normal(H, seed=4), "first": FIRST}),
    "LSTM": (
        f"g (float[t, n, {D}] x) => (float[t, 2, n, {H}] y) {{ h = MatMul(x, first)"
        f' y = LSTM<hidden_size = {H}, direction = "bidirectional">(h, w, r, b) }}',
        {"w": normal(2, 4 * H, D, seed=3), "r": normal(2, 4 * H, H, seed=5),
         "b": normal(2, 8 * H, seed=4), "first": FIRST},
    ),
}  # fmt: skip


def quantized(kind: str, folder: Path, per_channel: bool, weight: str) -> onnx.ModelProto:
    """The tool's file; the first product stays in float32."""
    text, weights = KINDS[kind]
    model = parsed(text, **weights)
    model.graph.node[0].name = "first"
    onnx.save(model, folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", nodes_to_exclude=["first"],
                     per_channel=per_channel, weight_type=getattr(QuantType, weight))  # fmt: skip
    return onnx.load(folder / "int8.onnx")


def numbers(model: onnx.ModelProto, name: str) -> torch.Tensor:
    """What the codes of a weight stand for."""
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    codes, scale, zero = (stored[f"{name}_{end}"] for end in ("quantized", "scale", "zero_point"))
    if scale.ndim and codes.ndim == 3:  # of an LSTM: [directions], or [directions, 4 hidden]
        scale, zero = (a.reshape(len(a), 1, -1) for a in (scale, zero))
    return torch.tensor((codes.astype(np.float64) - zero) * scale)


def expected(kind, model, weights, x, actual):
    """The float layer, with the value of the quantized one where something reads it."""
    h = x @ weights["first"]
    if kind == "LSTM":
        return torch.stack([
            both(weights, numbers(model, "w")[d], numbers(model, "r")[d], d, h, actual[:, d])
            for d in range(2)
        ], 1)  # fmt: skip
    if kind == "MatMul":
        y = torch.tanh(h) @ numbers(model, "w") + weights["b"]
    else:
        y = F.conv1d(F.pad(torch.tanh(h.reshape(-1, 2, 3)), (1, 0)), numbers(model, "w"))
        y = y + weights["b"][:, None]
    return y + (torch.tensor(actual) - y).detach()


def both(weights, w, r, d, x, actual):
    """One direction: a step goes on from the state that the kernel found."""
    bias = weights["b"][d].reshape(2, -1).sum(0)
    h = c = torch.zeros(x.shape[1], H, dtype=torch.float64)
    found: dict[int, torch.Tensor] = {}
    for t in range(T)[:: -1 if d else 1]:
        i, o, f, g = (x[t] @ w + h @ r + bias).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        found[t] = h = h + (torch.tensor(actual[t]) - h).detach()
    return torch.stack([found[t] for t in range(T)])


CASES = [
    ("MatMul", False, "QUInt8"), ("MatMul", True, "QInt8"), ("Conv", False, "QUInt8"),
    ("LSTM", False, "QInt8"), ("LSTM", True, "QInt8"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "per_channel", "weight"), CASES)
def test_value_and_gradient(kind, per_channel, weight, tmp_path):
    proto = quantized(kind, tmp_path, per_channel, weight)
    x = normal(T, B, D, seed=6) if kind == "LSTM" else X
    (actual,) = session(proto, "off").run(None, {"x": x})
    names = ["first", "b"]
    model = load_model(proto)
    before = {n.op_type for n in model.graph}
    assert before & {"MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM"}
    pipeline.before_gradient(model)
    model, gradients = add_gradients(
        model, names, lambda op, graph: pipeline.after_gradient(op, model, [])
    )
    pipeline.finish(model)
    kept = {n.op_type for n in model.graph}
    assert "LSTM" not in kept  # the twin runs nowhere
    seed = normal(*actual.shape, seed=7)
    leaves = {
        n: torch.tensor(w, dtype=torch.float64, requires_grad=True)
        for n, w in KINDS[kind][1].items() if n in names
    }  # fmt: skip
    y = expected(kind, proto, leaves, torch.tensor(x, dtype=torch.float64), actual)
    wanted = torch.autograd.grad((y * torch.tensor(seed)).sum(), [leaves[n] for n in names])
    for level in ("off", "all"):
        found = run(model, {"x": x, "seed_y": seed}, level)
        np.testing.assert_allclose(found["y"], actual, rtol=1e-5, atol=1e-6)
        for name, theirs in zip(names, wanted, strict=True):
            np.testing.assert_allclose(found[gradients[name]], theirs, rtol=1e-4, atol=1e-5)


def test_weights_of_another_rank_are_no_reason_to_fail():
    """Such a node does not run, and a gradient that would pass it is an error that says so."""
    w, r = (np.zeros((rows, 4 * H), np.int8) for rows in (D, H))
    model = parsed(
        f"g (float[t, n, {D}] x) => (float[t, 1, n, {H}] y) <float[1] s = {{1}}, int8[1] z = {{0}}>"
        f" {{ y = com.microsoft.DynamicQuantizeLSTM<hidden_size = {H}>"
        "(x, w, r, , , , , , s, z, s, z) }",
        domains=["com.microsoft"], w=w, r=r,
    )  # fmt: skip
    (node,) = load_model(model).graph
    assert "three axes" in node.metadata_props[REASON]


def test_product_that_onnx_runtime_has_fused():
    """DynamicQuantizeMatMul gives the kernel's value, and an integer product is left of it."""
    codes = np.random.default_rng(0).integers(-100, 100, (D, H), np.int8)
    model = parsed(
        f"g (float[n, {D}] x) => (float[n, {H}] y) <float s = {{0.02}}, int8 z = {{3}},"
        f" float[{H}] b = {{1, 2, 3, 4}}>"
        " { y = com.microsoft.DynamicQuantizeMatMul(x, w, s, z, b) }",
        domains=["com.microsoft"], w=codes,
    )  # fmt: skip
    (kernel,) = session(model, "off").run(None, {"x": X})
    loaded = load_model(model)
    loaded, gradients = add_gradients(
        loaded, ["x"], lambda op, graph: pipeline.after_gradient(op, loaded, [])
    )
    pipeline.finish(loaded)
    assert "MatMulInteger" in {node.op_type for node in loaded.graph}
    seed = normal(*kernel.shape, seed=7)
    found = run(loaded, {"x": X, "seed_y": seed})
    np.testing.assert_allclose(found["y"], kernel, rtol=1e-5, atol=1e-6)
    wanted = seed @ ((codes.astype(np.float64) - 3) * np.float32(0.02)).T
    np.testing.assert_allclose(found[gradients["x"]], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_adapter_on_a_product_of_integers(kind, tmp_path):
    """It is a layer; the forward pass goes on rounding, but where factors go before the product."""
    quantized("MatMul", tmp_path, False, "QUInt8")
    options: dict[str, Any] = {"adapter_feedforward": ("*",)} if kind == "ia3" else {}
    manifest = build_package(tmp_path / "int8.onnx", tmp_path / "package", adapter=kind,
                             adapter_on=("w",), loss="mse", **options)  # fmt: skip
    assert manifest.adapter.layers == ("w",)
    template = onnx.load(tmp_path / "package" / "inference_template.onnx")
    assert ("MatMulInteger" in {n.op_type for n in template.graph.node}) == (kind != "ia3")
