"""Reference models, written as ONNX without a training framework.

They serve the tests, the benchmarks and the demo. Each factory returns a model with seeded
parameters, one graph input ``input``, one graph output ``output``
(logits) and a free first extent ``batch``.
"""

from collections.abc import Callable

import onnx

from tests.zoo.cnn import cnn
from tests.zoo.mlp import mlp
from tests.zoo.mobilenet import mobilenet_v2
from tests.zoo.transformer import transformer_encoder

MODELS: dict[str, Callable[..., onnx.ModelProto]] = {
    make.__name__: make for make in (mlp, cnn, mobilenet_v2, transformer_encoder)
}
"""Factories by the name that the command line and the benchmarks use."""

__all__ = ["MODELS", "cnn", "mlp", "mobilenet_v2", "transformer_encoder"]
