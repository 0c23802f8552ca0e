"""ONNX Runtime executes what an edge holds back after what it waits for, on every level."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from odtpack.graph.ops import Ops
from odtpack.memory.schedule import ControlEdge, SizeNames

LEVELS = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_ALL")


def executed(path: Path, level: str, feeds: dict[str, np.ndarray]) -> tuple[list[str], np.ndarray]:
    """Names of the nodes in the order of ONNX Runtime's own profile, and the first output."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    options.enable_profiling = True
    options.profile_file_prefix = str(path.with_suffix(""))
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    result = session.run(None, feeds)[0]
    events = json.loads(Path(session.end_profiling()).read_text())
    suffix = "_kernel_time"
    names = [e["name"].removesuffix(suffix) for e in events if e["name"].endswith(suffix)]
    return names, result


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", ["rows", 3])
def test_same_nodes_run_twice_and_late(level: str, rows: str | int, tmp_path: Path) -> None:
    """Without the edge, elimination of common subexpressions leaves one Tanh, at the start."""
    x = ir.val("x", ir.DataType.FLOAT, [rows, 4])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17}, name="twice")
    op = Ops(graph)
    first = op.emit("Tanh", [x], name="first")[0]
    first.shape = x.shape
    late = op.emit("Sin", [first], name="late")[0]
    late.shape = x.shape
    view = ControlEdge(op, late, SizeNames()).view(x)
    second = op.emit("Tanh", [view], name="second")[0]
    out = op.emit("Sub", [late, second], name="out")[0]
    out.shape = ir.Shape([rows, 4])
    graph.outputs.append(out)
    path = tmp_path / "twice.onnx"
    ir.save(ir.Model(graph, ir_version=8), path)
    data = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    names, result = executed(path, level, {"x": data})
    assert {"first", "second"} <= set(names)
    assert names.index("late") < names.index("second")
    np.testing.assert_allclose(result, np.sin(np.tanh(data)) - np.tanh(data), rtol=1e-5, atol=1e-6)
