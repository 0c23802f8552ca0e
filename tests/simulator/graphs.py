"""Models from text, and a graph as the memory plan sees it."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime

from odtpack_simulator.memory.runtime_graph import RuntimeGraph, load_runtime_graph


def weighted(
    text: str, weights: Mapping[str, tuple[int, ...] | np.ndarray] = {}, scale: float = 1
) -> onnx.ModelProto:
    """The model of a graph's text, in opset 17 unless the text names others.

    Weights are arrays, or shapes of normal numbers times ``scale``.
    """
    head = "" if text.lstrip().startswith("<") else '<ir_version: 8, opset_import: ["": 17]>'
    model = onnx.parser.parse_model(head + text)
    random = np.random.default_rng(0)
    for name, given in weights.items():
        drawn = isinstance(given, tuple)
        value = random.standard_normal(given, np.float32) * np.float32(scale) if drawn else given
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def zeros(opened: onnxruntime.InferenceSession, batch: int) -> dict[str, np.ndarray]:
    """What a session may run on, with so many samples along its open axes."""
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
    return {
        each.name: np.zeros([n if isinstance(n, int) else batch for n in each.shape],
                            kinds[each.type])
        for each in opened.get_inputs()
    }  # fmt: skip


def load_model(
    model: onnx.ModelProto | str, shapes: Mapping[str, tuple[int, ...]] = {}
) -> RuntimeGraph:
    """A model, or that of a graph's text, with inputs of these shapes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(weighted(model) if isinstance(model, str) else model, path)
        return load_runtime_graph(path, dict(shapes))
