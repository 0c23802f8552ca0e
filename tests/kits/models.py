"""Small networks for the conformance suite of the training kits."""

import numpy as np
import onnx

from tests import zoo
from tests.model_text import retyped
from tests.simulator.graphs import weighted


def cnn() -> onnx.ModelProto:
    """The network of ``odtpack demo``: digits of 8 x 8 pixels."""
    return zoo.cnn(size=8, width=(16, 32), seed=0)


def mlp() -> onnx.ModelProto:
    """Two layers, for what does not depend on the network."""
    return zoo.mlp((16, 12, 4), seed=1)


def wide() -> onnx.ModelProto:
    """Three layers: a step model cuts the second, updates the first whole and joins the others."""
    return zoo.mlp((16, 4096, 64, 4), seed=5)


def mobilenet() -> onnx.ModelProto:
    """MobileNetV2 with batch normalization in training mode."""
    return zoo.mobilenet_v2(size=32, classes=4, width_mult=0.25, batch_norm="train", seed=2)


def transformer() -> onnx.ModelProto:
    """An encoder of two layers."""
    return zoo.transformer_encoder(vocab=50, d=16, layers=2, heads=2, T=12, ff=32, classes=4)


def of_tokens() -> onnx.ModelProto:
    """The encoder with the name of its input that exporters of language models take."""
    model = transformer()
    for node in model.graph.node:
        node.input[:] = ["input_ids" if name == "input" else name for name in node.input]
    model.graph.input[0].name = "input_ids"
    return model


def recommender() -> onnx.ModelProto:
    """Users and items as rows of tables; a product of their features and two layers."""
    text = """recommender (int64[batch] user, int64[batch] item) => (float[batch, 1] score) {
        of_user = Gather(user_table, user) of_item = Gather(item_table, item)
        product = Mul(of_user, of_item) both = Concat<axis = 1>(of_user, of_item, product)
        hidden = Gemm<transB = 1>(both, hidden_weight, hidden_bias) active = Relu(hidden)
        score = Gemm<transB = 1>(active, score_weight, score_bias)
    }"""
    shapes = {
        "user_table": (30, 8), "item_table": (40, 8), "hidden_weight": (16, 24),
        "hidden_bias": (16,), "score_weight": (1, 16), "score_bias": (1,),
    }  # fmt: skip
    return _with_values(text, shapes, seed=3)


def gru() -> onnx.ModelProto:
    """Letters, a GRU, and its last state classified."""
    text = """gru (int64[batch, time] letters) => (float[batch, 5] output) {
        embedded = Gather(table, letters) turned = Transpose<perm = [1, 0, 2]>(embedded)
        states, last = GRU<hidden_size = 12, linear_before_reset = 1>(turned, w, r, b)
        axis = Constant<value_ints = [0]>() state = Squeeze(last, axis)
        output = Gemm<transB = 1>(state, classifier_weight, classifier_bias)
    }"""
    shapes = {
        "table": (20, 8), "w": (1, 36, 8), "r": (1, 36, 12), "b": (1, 72),
        "classifier_weight": (5, 12), "classifier_bias": (5,),
    }  # fmt: skip
    return _with_values(text, shapes, seed=4)


def _with_values(text: str, shapes: dict[str, tuple[int, ...]], seed: int) -> onnx.ModelProto:
    random = np.random.default_rng(seed)
    values = {name: random.standard_normal(shape) * 0.3 for name, shape in shapes.items()}
    return weighted(text, {name: value.astype(np.float32) for name, value in values.items()})


def roots() -> onnx.ModelProto:
    """A network whose loss is finite for an input of 0, and the gradient of ``scale`` is not."""
    text = """roots (float[batch, 4] input) => (float[batch, 3] output) {
        scaled = Mul(input, scale) sign = Sign(scaled) size = Mul(scaled, sign) root = Sqrt(size)
        output = Gemm<transB = 1>(root, weight, bias)
    }"""
    return _positive(text, scale=(4,), weight=(3, 4), bias=(3,))


def looked_up() -> onnx.ModelProto:
    """A network with a table of five words, which fails on others."""
    text = """looked_up (int64[batch] words) => (float[batch, 3] output) {
        found = Gather(table, words) output = Gemm<transB = 1>(found, weight, bias)
    }"""
    return _positive(text, table=(5, 4), weight=(3, 4), bias=(3,))


def scores() -> onnx.ModelProto:
    """A network whose input is its output at first."""
    text = "g (float[batch, 3] input) => (float[batch, 3] output) { output = Mul(input, scale) }"
    return weighted(text, {"scale": np.ones(3, np.float32)})


def undecided() -> onnx.ModelProto:
    """A network of float16 with the same score for every class."""
    model = retyped(mlp(), np.float16)
    for tensor in model.graph.initializer:
        if tensor.name.startswith("fc2."):
            tensor.raw_data = bytes(len(tensor.raw_data))
    return model


def segmented() -> onnx.ModelProto:
    """A class for each pixel; the labels have a name of their own."""
    text = """segmented (float[batch, 3, 4, 4] input, int64[batch, 4, 4] marks)
        => (float[batch, 4, 4, 4] output) { output = Conv(input, weight) }"""
    return _with_values(text, {"weight": (4, 3, 1, 1)}, seed=6)


def speaker() -> onnx.ModelProto:
    """A language model that knows the last word alone, of as many words as positions."""
    text = """speaker (int64[batch, 5] words) => (float[batch, 5, 5] output) {
        found = Gather(table, words) output = MatMul(found, weight)
    }"""
    return _with_values(text, {"table": (5, 8), "weight": (8, 5)}, seed=7)


def _positive(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    rng = np.random.default_rng(5)
    values = {name: rng.uniform(0.5, 1.5, shape) for name, shape in shapes.items()}
    return weighted(text, {name: value.astype(np.float32) for name, value in values.items()})
