"""Loads a model as the memory plan sees it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx.parser

from odtpack_simulator.memory.runtime_graph import RuntimeGraph, load_runtime_graph


def load_model(model: onnx.ModelProto) -> RuntimeGraph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        return load_runtime_graph(path, {})
