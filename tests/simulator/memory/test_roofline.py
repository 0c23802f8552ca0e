"""The roofline, and reading what ONNX Runtime's profile says about nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper

from odtpack_simulator.measure.calibration import Calibration, calibrate
from odtpack_simulator.measure.host import clock_hz
from odtpack_simulator.measure.operators import (
    CONTROL_FLOW,
    NodeRun,
    middle_mean,
    model_runs,
    typical_step,
)
from odtpack_simulator.memory.operator_work import COMPUTE_BOUND, SMALL, Roof, Work
from odtpack_simulator.replay.child.timing_run import grouped

ROOF = Roof(flops=100e9, bandwidth=20e9)


class TestRoof:
    def test_the_ridge_parts_the_classes(self) -> None:
        assert ROOF.ridge == 5
        assert ROOF.bound("MatMul", Work(5e6, 1e6)) == "compute"
        assert ROOF.bound("MatMul", Work(4.9e6, 1e6)) == "memory"

    def test_a_machine_with_little_bandwidth_is_bound_by_it(self) -> None:
        assert Roof(100e9, 10e9).bound("Conv", Work(8e6, 1e6)) == "memory"
        assert Roof(50e9, 10e9).bound("Conv", Work(8e6, 1e6)) == "compute"

    def test_the_slower_roof_counts(self) -> None:
        assert ROOF.seconds(Work(1e9, 1e6)) == pytest.approx(0.01)
        assert ROOF.seconds(Work(1e6, 1e9)) == pytest.approx(0.05)
        assert ROOF.seconds(Work(None, 1e9)) == pytest.approx(0.05)

    def test_work_shorter_than_the_runtime_is_bound_by_neither(self) -> None:
        small = Work(100.0, 400.0)
        assert ROOF.bound("Gemm", small, 1e-6) == "other"
        assert ROOF.bound("Add", Work(None, 400.0), 1e-6) == "other"
        assert ROOF.bound("Add", Work(None, 400e3), 1e-6) == "memory"

    def test_the_list_decides_where_the_arithmetic_is_unknown(self) -> None:
        assert ROOF.bound("Einsum", Work(None, 1e6)) == "compute"
        assert ROOF.bound("Einsum", Work(None, 10.0), 1e-6) == "compute"
        assert ROOF.bound("ReduceSum", Work(None, 1e6)) == "memory"
        assert ROOF.bound("Shape", Work(None, 1e6)) == "other"

    def test_lists_do_not_overlap(self) -> None:
        assert not COMPUTE_BOUND & SMALL
        assert not CONTROL_FLOW & (COMPUTE_BOUND | SMALL)


def nodes(*times: float, op_type: str = "Add", nbytes: float = 8) -> list[NodeRun]:
    return [NodeRun(f"n{i}", op_type, us, Work(None, nbytes)) for i, us in enumerate(times)]


class TestTypicalStep:
    def test_nodes_take_the_middle_of_their_times(self) -> None:
        """The first step is left out; one that was interrupted does not show."""
        runs = [nodes(90, 90), nodes(1, 2), nodes(1, 900), nodes(2, 2), nodes(2, 2)]
        found = typical_step(runs, 5)
        assert [node.us for node in found] == [1.5, 2]

    def test_runs_of_one_step_belong_together(self) -> None:
        """An optimizer that runs chunk by chunk."""
        found = typical_step([nodes(9), nodes(9), nodes(1), nodes(2), nodes(1), nodes(2)], 3)
        assert [node.us for node in found] == [1, 2]

    def test_steps_that_differ(self) -> None:
        """A loop that ran longer: the step in the middle stands for all."""
        runs = [nodes(9), nodes(1, 1), nodes(1, 1, 1, 1), nodes(1, 1, 1)]
        assert len(typical_step(runs, 4)) == 3

    def test_middle_mean(self) -> None:
        assert middle_mean([7]) == 7
        assert middle_mean([1, 3]) == 2
        assert middle_mean([0, 2, 4, 100]) == 3


class TestGrouping:
    def test_equal_work_is_put_together(self) -> None:
        rows = grouped([*nodes(1, 2), *nodes(5, nbytes=16), *nodes(7, op_type="Mul")])
        assert sorted((r["op_type"], r["calls"], r["us"], r["moved_bytes"]) for r in rows) == [
            ("Add", 1, 5, 16),
            ("Add", 2, 3, 16),
            ("Mul", 1, 7, 8),
        ]

    def test_too_many_kinds_are_told_by_operator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("odtpack_simulator.replay.child.timing_run._MAX_ROWS", 2)
        many = [node for us in range(1, 6) for node in nodes(us, nbytes=us)]
        rows = grouped([*many, *nodes(0.5, op_type="Mul")])
        assert [(r["op_type"], r["us"], r["moved_bytes"]) for r in rows] == [
            ("Add", 5, 5),
            ("Add", 4, 4),
            ("Add", 6, 6),
            ("Mul", 0.5, 8),
        ]
        assert rows[2]["calls"] == 3


def test_nodes_of_a_real_profile(tmp_path: Path) -> None:
    """A convolution and what follows it inside an If: shapes and types as they ran."""
    inside = helper.make_graph(
        [helper.make_node("Relu", ["y"], ["r"], name="relu")],
        "then",
        [],
        [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["y"], name="conv", strides=[2, 2]),
            helper.make_node("If", ["c"], ["z"], then_branch=inside, else_branch=inside),
        ],
        "one",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, 9, 9]),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, [6, 4, 3, 3]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )
    model = ModelProto(ir_version=8, graph=graph)
    model.opset_import.append(helper.make_opsetid("", 17))
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "p")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feeds: dict[str, Any] = {
        "x": np.zeros((2, 4, 9, 9), np.float32),
        "w": np.zeros((6, 4, 3, 3), np.float32),
        "c": np.array(True),
    }
    for _ in range(3):
        session.run(None, feeds)
    runs = model_runs(Path(session.end_profiling()))
    assert len(runs) == 3
    for run in runs:
        assert [(node.node, node.op_type) for node in run] == [("conv", "Conv"), ("relu", "Relu")]
        conv, relu = (node.work for node in run)
        assert conv.flops == 2 * (2 * 6 * 4 * 4) * (4 * 3 * 3)
        assert conv.moved_bytes == 4 * (2 * 4 * 81 + 6 * 4 * 9 + 2 * 6 * 16)
        assert relu == Work(None, 4 * 2 * (2 * 6 * 16))


def test_calibration_of_this_machine() -> None:
    found = calibrate(1)
    assert found.core_flops == found.gemm_flops > 0
    assert found.copy_bandwidth > 0
    assert found.roof.bandwidth == 2 * found.copy_bandwidth
    assert min(found.profile_us, found.node_us) >= 0
    sent = json.loads(json.dumps({name: getattr(found, name) for name in found.__slots__}))
    assert Calibration.from_message(sent) == found


def test_the_clock_is_a_clock_or_unknown() -> None:
    found = clock_hz()
    assert found is None or 1e8 < found < 1e10
