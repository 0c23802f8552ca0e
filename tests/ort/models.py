"""Models whose packages need all sorts of kernels: fused ones, ones of subgraphs, casts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from odtpack.build import build_package
from odtpack.choices import OrtFormat, Platform, Style
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.model_text import parsed

BOTH_STYLES = OrtFormat(styles=tuple(Style))
EVERYTHING = OrtFormat(styles=tuple(Style), platforms=tuple(Platform))


def scan() -> onnx.ModelProto:
    """A recurrence, whose Tanh stands in the body of a Scan only."""
    text = """forward (float[T, N, 3] x) => (float[N, 4] y) {
      mean = ReduceMean <axes = [0], keepdims = 0> (x) projected = MatMul(mean, w)
      start = Sub(projected, projected)
      y = Scan <num_scan_inputs = 1, body = turn (float[N, 4] h, float[N, 3] part)
          => (float[N, 4] next) {
        a = MatMul(part, w) b = MatMul(h, u) sum = Add(a, b) next = Tanh(sum)
      }> (start, x)
    }"""
    random, shapes = np.random.default_rng(0), {"w": (3, 4), "u": (4, 4)}
    weights = {name: random.normal(0, 0.5, shape) for name, shape in shapes.items()}
    return parsed(text, **{name: each.astype(np.float32) for name, each in weights.items()})


def half() -> onnx.ModelProto:
    """A float16 network, for whose operators the CPU has few kernels."""
    model = zoo.mlp((6, 5, 4))
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    del model.graph.value_info[:]
    return model


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "mlp": (lambda: zoo.mlp((6, 5, 4)), "cross_entropy"),
    "cnn": (lambda: zoo.cnn(size=8, width=(4, 6), classes=4), "cross_entropy"),
    "mobilenet": (lambda: zoo.mobilenet_v2(32, 4, 0.1, "fold"), "cross_entropy"),
    "transformer": (
        lambda: zoo.transformer_encoder(vocab=20, d=16, layers=1, T=8, ff=32, classes=4, opset=18),
        "cross_entropy",
    ),
    "scan": (scan, "mse"),
    "half": (half, "cross_entropy"),
}


def package_of(name: str, folder: Path, ort_format: OrtFormat | None = None) -> Package:
    """Build the package of one of :data:`MODELS`."""
    model, loss = MODELS[name]
    build_package(model(), folder, loss=loss, ort_format=ort_format)
    return Package.open(folder)
