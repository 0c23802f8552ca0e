"""ONNX Runtime makes of the order of a file the order that was planned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from odtpack.graph.ops import Ops
from odtpack.memory.compile import gradients_at_once
from odtpack.memory.schedule import arrange, places_of
from odtpack.memory.timeline import Step, Timeline
from odtpack_simulator.memory.runtime_graph import load_runtime_graph
from tests.memory.test_control_edge import LEVELS, executed


def backward(layers: int, biases_first: bool) -> ir.Model:
    """Chains as a training graph has them: what each step gives is also added up for an output."""
    x = ir.val("x", ir.DataType.FLOAT, [8, 64])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17}, name="backward")
    op, value, sums = Ops(graph), x, []
    for layer in range(layers):
        value = op.emit("Sin", [value], name=f"chain{layer}")[0]
        sums.append(op.emit("ReduceSum", [value, op.ints(0)], name=f"sum{layer}", keepdims=0)[0])
    loss = op.emit("ReduceMean", [value], name="loss", keepdims=0)[0]
    loss.shape = ir.Shape([])
    for each in sums:
        each.type, each.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([64])
    graph.outputs.extend([loss, *(sums if biases_first else reversed(sums))])
    return ir.Model(graph, ir_version=8)


@pytest.mark.parametrize("biases_first", [False, True])
def test_gradients_at_once(biases_first: bool, tmp_path: Path) -> None:
    model = backward(6, biases_first)
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    graph = gradients_at_once(load_runtime_graph(path, {}))
    names = [node.name for node in graph.nodes]
    for layer in range(5):
        assert names.index(f"sum{layer}") == names.index(f"chain{layer}") + 1
    step = Step(graph)
    assert step.timeline().peak <= Step(load_runtime_graph(path, {})).timeline().peak


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("biases_first", [False, True])
def test_profile_shows_the_planned_order(level: str, biases_first: bool, tmp_path: Path) -> None:
    model = backward(6, biases_first)
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    step = Step(gradients_at_once(load_runtime_graph(path, {})))
    planned: Timeline = step.timeline()
    arrange(model.graph, places_of(model.graph, planned, {}))
    ir.save(model, path)
    found, _ = executed(path, level, {"x": np.ones((8, 64), np.float32)})
    wanted = [node.name for node in planned.nodes]
    assert [name for name in found if name in wanted] == wanted
