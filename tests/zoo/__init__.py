"""Reference models of tests, benchmarks and the demo, written without a training framework.

Each has seeded parameters, one input ``input``, logits ``output`` and a free extent ``batch``.
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
