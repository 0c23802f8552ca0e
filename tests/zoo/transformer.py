"""A transformer encoder that classifies a sequence of tokens."""

import numpy as np
import onnx
from onnx import TensorProto

from tests.zoo.graph_writer import GraphWriter, require, require_positive, xavier

_LAYER_NORM_EPSILON = 1e-5
_CLASSIFIER_STD = 0.02  # as in BERT; a larger one makes plain SGD overshoot from the first step


def transformer_encoder(
    *, vocab: int = 1000, d: int = 256, layers: int = 4, heads: int = 4, T: int = 128,
    ff: int = 1024, classes: int = 10, opset: int = 17, seed: int = 0,
) -> onnx.ModelProto:  # fmt: skip
    """Builds an encoder as ``torch.nn.TransformerEncoderLayer`` does by default, with exact GELU.

    Token and position embeddings are added; each layer normalizes after the residual addition
    (post-LN, Vaswani et al. 2017); the mean over the positions is classified. There is no
    attention mask and no dropout.

    The projections inside a layer are ``MatMul`` and ``Add``, with weights [in, out] such as
    ``layers.0.attention.query.weight``; the classifier is a ``Gemm`` with ``classifier.weight``
    [classes, d]. Layer normalization is the ``LayerNormalization`` operator from opset 17 and
    elementary operators before; GELU is the ``Gelu`` operator from opset 20 and ``Erf`` before.

    ``input`` is int64 [batch, T]: tokens of ``vocab``, of which each has ``d`` features, a multiple
    of ``heads``. ``ff`` are the features of the hidden layer of a feed-forward block.
    """
    arguments = {
        "vocab": vocab, "d": d, "layers": layers, "heads": heads, "T": T, "ff": ff,
        "classes": classes,
    }  # fmt: skip
    require_positive("transformer_encoder", **arguments)
    wrong = f"d must be a multiple of heads, but {d} is none of {heads}"
    require(d % heads == 0, "transformer_encoder", wrong)
    writer = _EncoderWriter("transformer_encoder", arguments, opset=opset, seed=seed)
    tokens = writer.input(["batch", T], TensorProto.INT64)
    table = writer.uniform("token_embedding.weight", (vocab, d), std=1.0)
    x = writer.op("Gather", table, tokens, at="token_embedding", axis=0)
    positions = writer.uniform("position_embedding.weight", (T, d), std=1.0)
    x = writer.op("Add", x, positions, at="position_embedding")
    for layer in range(layers):
        at = f"layers.{layer}"
        x = writer.op("Add", x, writer.attention(x, T, d, heads, f"{at}.attention"), at=at)
        x = writer.layer_norm(x, d, f"{at}.norm1")
        hidden = writer.gelu(writer.project(x, d, ff, f"{at}.linear1"), f"{at}.activation")
        hidden = writer.project(hidden, ff, d, f"{at}.linear2")
        x = writer.op("Add", x, hidden, at=at)
        x = writer.layer_norm(x, d, f"{at}.norm2")
    x = writer.reduce_mean(x, axis=1, keepdims=False, at="pool")
    x = writer.linear(x, d, classes, at="classifier", std=_CLASSIFIER_STD)
    return writer.finish(x, ["batch", classes])


class _EncoderWriter(GraphWriter):
    """A graph writer with the blocks of an encoder layer."""

    def project(self, x: str, fan_in: int, fan_out: int, at: str) -> str:
        """``x @ {at}.weight + {at}.bias`` over the last axis of a rank-3 value."""
        weight = self.uniform(f"{at}.weight", (fan_in, fan_out), std=xavier(fan_in, fan_out))
        bias = self.fill(f"{at}.bias", (fan_out,), 0.0)
        return self.op("Add", self.op("MatMul", x, weight, at=at), bias, at=at)

    def attention(self, x: str, T: int, d: int, heads: int, at: str) -> str:
        """Multi-head self-attention: [batch, T, d] to [batch, T, d]."""

        def split(name: str, perm: list[int]) -> str:
            place = f"{at}.{name}"
            # The leading 0 copies the free batch extent.
            shape = self.constant([0, T, heads, d // heads], np.int64)
            value = self.op("Reshape", self.project(x, d, d, place), shape, at=place)
            return self.op("Transpose", value, at=place, perm=perm)

        query = split("query", [0, 2, 1, 3])
        key_transposed = split("key", [0, 2, 3, 1])
        value = split("value", [0, 2, 1, 3])
        scores = self.op("MatMul", query, key_transposed, at=at)
        scores = self.op("Div", scores, self.constant((d // heads) ** 0.5), at=at)
        weights = self.op("Softmax", scores, at=at, axis=-1)
        mixed = self.op("MatMul", weights, value, at=at)
        mixed = self.op("Transpose", mixed, at=at, perm=[0, 2, 1, 3])
        mixed = self.op("Reshape", mixed, self.constant([0, T, d], np.int64), at=at)
        return self.project(mixed, d, d, f"{at}.output")

    def layer_norm(self, x: str, d: int, at: str) -> str:
        """Normalization over the last axis with ``{at}.weight`` and ``{at}.bias``."""
        weight = self.fill(f"{at}.weight", (d,), 1.0)
        bias = self.fill(f"{at}.bias", (d,), 0.0)
        if self.opset >= 17:
            return self.op(
                "LayerNormalization", x, weight, bias, at=at, axis=-1, epsilon=_LAYER_NORM_EPSILON
            )
        mean = self.reduce_mean(x, axis=-1, keepdims=True, at=at)
        centred = self.op("Sub", x, mean, at=at)
        squared = self.op("Pow", centred, self.constant(2.0), at=at)
        variance = self.reduce_mean(squared, axis=-1, keepdims=True, at=at)
        shifted = self.op("Add", variance, self.constant(_LAYER_NORM_EPSILON), at=at)
        normal = self.op("Div", centred, self.op("Sqrt", shifted, at=at), at=at)
        return self.op("Add", self.op("Mul", normal, weight, at=at), bias, at=at)

    def gelu(self, x: str, at: str) -> str:
        """``x * (1 + erf(x / sqrt(2))) / 2`` (Hendrycks and Gimpel 2016)."""
        if self.opset >= 20:
            return self.op("Gelu", x, at=at)
        erf = self.op("Erf", self.op("Div", x, self.constant(2**0.5), at=at), at=at)
        gate = self.op("Add", erf, self.constant(1.0), at=at)
        return self.op("Mul", self.op("Mul", x, gate, at=at), self.constant(0.5), at=at)

    def reduce_mean(self, x: str, *, axis: int, keepdims: bool, at: str) -> str:
        """``ReduceMean``, whose axes are an attribute before opset 18 and an input since."""
        if self.opset >= 18:
            axes = self.constant([axis], np.int64)
            return self.op("ReduceMean", x, axes, at=at, keepdims=int(keepdims))
        return self.op("ReduceMean", x, at=at, axes=[axis], keepdims=int(keepdims))
