"""A forward model of two nodes, and ways to vary it and to look at what becomes of it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from tests.model_text import drawn, parsed


def linear(*, inputs="", outputs="float[N, 2] y", more="", opset=17, **values):
    """y = x w + b, and what ``more`` says; ``values`` are further initializers."""
    text = f"(float[N, 3] x{inputs}) => ({outputs}) {{ h = MatMul(x, w) y = Add(h, b) {more} }}"
    own = drawn(np.random.default_rng(0), w=(3, 2), b=(2,))
    return parsed(f"forward {text}", opset, **values, **{n: own[n] for n in own if n not in values})


def renamed(model: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    """The model with another name for a value."""
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in (*model.graph.initializer, *model.graph.input, *model.graph.output):
        if value.name == old:
            value.name = new
    return model


def make(model: Any, folder: Path, **arguments: Any) -> Path:
    """Artifacts with MSE and SGD that train ``w`` and ``b``, unless told otherwise."""
    given = {"requires_grad": ["w", "b"], "loss": LossType.MSELoss, "optimizer": OptimType.SGD}
    generate_artifacts(model, **(given | arguments), artifact_directory=folder)
    return folder


def names(path: Path) -> tuple[list[str], list[str]]:
    """Names of the inputs and of the outputs of a model file."""
    graph = onnx.load(path).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
