"""Forward models that the reference differentiates, and data for them."""

from pathlib import Path

import numpy as np
import onnx.parser

from tests import zoo
from tests.model_text import computed, drawn, parsed
from tests.packaging_tools import batch, open_training
from tests.training import settled


def mobilenet() -> onnx.ModelProto:
    """MobileNetV2 with batch normalization folded, for the batch of :func:`feeds`."""
    x, _ = batch(zoo.mobilenet_v2(), 2, seed=3)
    return settled.mobilenet("fold", x)


def transformer(opset: int = 14) -> onnx.ModelProto:
    """A small encoder. Opset 14 for the reference, which fails at LayerNormalization of 17."""
    return zoo.transformer_encoder(vocab=100, d=64, layers=2, T=32, ff=128, opset=opset)


def small(head: str = "", ratio: float = 0.0) -> onnx.ModelProto:
    """Convolution, batch normalization in training mode, Dropout, Gemm, and a loss as ``head``."""
    rng = np.random.default_rng(4)
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 15]>
        small (float[n, 1, 6, 6] x{", int64[n] labels" if head else ""})
          => ({"float loss" if head else "float[n, 3] y"})
        <float ratio = {{{ratio}}}, bool training = {{1}}, float[3] share = {{0.5, 1.0, 2.0}}>
        {{
          h = Conv <pads = [1, 1, 1, 1]> (x, conv_weight)
          b, mean, var = BatchNormalization <training_mode = 1, momentum = 0.8>
            (h, bn_weight, bn_bias, bn_mean, bn_var)
          r = Relu(b)
          p = GlobalAveragePool(r)
          f = Flatten(p)
          d, mask = Dropout(f, ratio, training)
          y = Gemm <transB = 1> (d, fc_weight, fc_bias)
          {head}
        }}""")
    shapes = {"conv_weight": (8, 1, 3, 3), "bn_weight": (8,), "bn_bias": (8,), "bn_mean": (8,),
              "bn_var": (8,), "fc_weight": (3, 8), "fc_bias": (3,)}  # fmt: skip
    for name, shape in shapes.items():
        values = rng.uniform(0.5, 1.5, shape) if "bn_" in name else rng.normal(0, 0.5, shape)
        tensor = onnx.numpy_helper.from_array(values.astype(np.float32), name)
        model.graph.initializer.append(tensor)
    return model


def in_inference_mode() -> onnx.ModelProto:
    """:func:`small` with a batch normalization as PyTorch exports it for inference."""
    model = small()
    layer = next(node for node in model.graph.node if node.op_type == "BatchNormalization")
    kept = [a for a in layer.attribute if a.name != "training_mode"]
    del layer.attribute[:]
    layer.attribute.extend(kept)
    del layer.output[1:]
    return model


def small_opset13() -> onnx.ModelProto:
    """The same from before there was an attribute for the training mode."""
    model = in_inference_mode()
    model.opset_import[0].version = 13
    return model


STATISTICS = ["bn_mean", "bn_var"]
TRAINED = ["conv_weight", "bn_weight", "bn_bias", "fc_weight", "fc_bias"]


W = np.random.default_rng(9).normal(size=(5, 4)).astype(np.float32) * np.float32(0.4)


def by_position() -> onnx.ModelProto:
    """Scores whose classes are on axis 1, of a size that is only known where the model runs."""
    model = parsed("(float[N, A, 5] x) => (float[N, A, 4] y) { y = MatMul(x, w) }", 15, w=W)
    model.graph.name = "by_position"
    return model


def turned() -> onnx.ModelProto:
    """A model that ends in the squared difference of its target and its result."""
    model = parsed("""(float[N, 5] x, float[N, 4] target) => (float loss) <float two = {2.0}> {
        y = MatMul(x, w) d = Sub(target, y) p = Pow(d, two) loss = ReduceMean <keepdims = 0> (p)
    }""", 15, w=W)  # fmt: skip
    model.graph.name = "turned"
    return model


def two_heads() -> onnx.ModelProto:
    """A model of which a loss reads ``near`` only."""
    return parsed("""(float[b, 6] x) => (float[b, 3] far, float[b, 4] near) {
        a = MatMul(x, w) h = Tanh(a) far = MatMul(h, frozen) near = MatMul(h, trained)
    }""", **drawn(np.random.default_rng(2), w=(6, 5), frozen=(5, 3), trained=(5, 4)))  # fmt: skip


def check_heads(package: Path) -> None:
    """A package of ``two_heads`` exports both, and evaluates one."""
    _, module, _ = open_training(package)
    module.export_model_for_inferencing(package / "heads.onnx", ["far", "near"])
    x = np.random.default_rng(3).normal(size=(2, 6)).astype(np.float32)
    expected, found = (computed(model, x=x) for model in (two_heads(), package / "heads.onnx"))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)
    nodes = onnx.load(package / "eval_model.onnx").graph.node
    assert "far" not in {name for node in nodes for name in node.output}


def feeds(model: onnx.ModelProto, loss: str, size: int) -> dict[str, np.ndarray]:
    """One batch for a model with this loss."""
    random = np.random.default_rng(5)
    if model.graph.name == "by_position":
        x = random.normal(size=(size, 4, 5)).astype(np.float32)
        return {"x": x, "labels": random.integers(0, 4, (size, 4))}
    if model.graph.name == "turned":
        shapes = {"x": (size, 5), "target": (size, 4)}
        return {k: random.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}
    classes = 3 if model.graph.name == "small" else 10
    x, labels = batch(model, size, seed=3, classes=classes)
    name = model.graph.input[0].name
    if loss in ("cross_entropy", "none"):
        return {name: x, "labels": labels}
    target = np.random.default_rng(8).random((size, 10), dtype=np.float32)
    return {name: x, "target": np.round(target) if loss == "bce_with_logits" else target}
