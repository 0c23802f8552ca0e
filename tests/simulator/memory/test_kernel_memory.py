"""Working memory and buffer sharing of single operators, as ONNX Runtime's arena counts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from odtpack_simulator.memory.arena import allocate
from odtpack_simulator.memory.kernel_memory import ALIASES, IN_PLACE, NCHWC_DOMAIN, workspaces
from tests.simulator.graphs import load_model

Shape = tuple[int, ...]

NOT_IN_PLACE = [
    *("Abs", "Exp", "Erf", "Log", "Neg", "Reciprocal", "Sqrt", "Sin"),
    *("Add", "Div", "Max", "Mul", "Pow", "Sub", "Transpose", "LayerNormalization"),
]


def run_alone(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, np.ndarray],
    constants: dict[str, np.ndarray],
    outputs: dict[str, int],
    opset: int = 17,
) -> dict[str, Any]:
    """The profile's memory figures of the node called ``probe``, from the first run."""
    graph = helper.make_graph(
        nodes,
        "probe",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in inputs.items()
        ],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = onnx.ModelProto(ir_version=8, graph=graph)
    model.opset_import.append(helper.make_opsetid("", opset))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.intra_op_num_threads = 1
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    session.run(None, inputs)
    events = json.loads(Path(session.end_profiling()).read_text())
    figures: dict[str, Any] = next(
        event["args"] for event in events if event["name"] == "probe_kernel_time"
    )
    if "mem_in_use_peak" not in figures or "mem_requested_in_use_delta" not in figures:
        pytest.fail("this ONNX Runtime does not write memory to its profiles")
    return figures


def constants_of(op_type: str) -> dict[str, np.ndarray]:
    scale = np.ones(64, np.float32)
    return {
        "LayerNormalization": {"scale": scale},
        "Reshape": {"shape": np.array([4096], np.int64)},
        "ScatterElements": {"i": np.zeros((1, 1), np.int64), "u": np.zeros((1, 1), np.float32)},
        "Unsqueeze": {"axes": np.array([0], np.int64)},
    }.get(op_type, {})


@pytest.mark.parametrize("op_type", [*sorted(IN_PLACE | ALIASES), *NOT_IN_PLACE])
def test_shared_buffers(op_type: str, tmp_path: Path) -> None:
    """An operator that takes its input's buffer adds nothing to the bytes in use."""
    binary = op_type in ("Add", "Div", "Max", "Mul", "Pow", "Sub")
    operands = ["a", "b"] if binary else ["a"]
    constants = constants_of(op_type)
    attributes = {"to": TensorProto.FLOAT} if op_type == "Cast" else {}
    nodes = [helper.make_node("Transpose", [f"x{n}"], [n], perm=[1, 0]) for n in operands]
    probe = helper.make_node(op_type, [*operands, *constants], ["y"], name="probe", **attributes)
    nodes += [probe, helper.make_node("Shape", ["y"], ["s"])]
    values = np.random.default_rng(0).random((64, 64), np.float32)
    figures = run_alone(
        tmp_path, nodes, {f"x{n}": values for n in operands}, constants, {"s": TensorProto.INT64}
    )
    shared = op_type in IN_PLACE | ALIASES
    assert int(figures["mem_requested_in_use_delta"]) == (0 if shared else values.nbytes)


def workspace(*of: Any, **more: Any) -> int:
    """Bytes of all buffers of an operator together."""
    return sum(workspaces(*of, **more))


def conv(image: Shape, weight: Shape, **attributes: object) -> tuple[str, list[Shape], dict]:
    return "Conv", [image, weight], attributes


@pytest.mark.parametrize(
    ("op_type", "shapes", "attributes"),
    [
        conv((8, 3, 48, 48), (32, 3, 3, 3), pads=[1] * 4, strides=[2, 2]),
        conv((8, 16, 24, 24), (96, 16, 1, 1)),
        conv((8, 16, 24, 24), (96, 16, 1, 1), strides=[2, 2]),
        conv((2, 64, 7, 7), (128, 64, 3, 3), pads=[1] * 4),
        conv((2, 32, 14, 14), (32, 1, 3, 3), pads=[1] * 4, group=32),
        conv((4, 16, 64), (32, 16, 3)),
        ("ConvTranspose", [(4, 16, 14, 14), (16, 8, 3, 3)], {"strides": [2, 2]}),
        ("ConvTranspose", [(4, 16, 14, 14), (16, 1, 3, 3)], {"group": 16}),
        ("Where", [(64, 64), (64, 64), ()], {}),
        ("Where", [(64,), (), (64, 64)], {}),
        ("Where", [(64, 64), (1, 64), (64, 1)], {}),
        ("Sum", [(64, 64)] * 2, {}),
        ("Sum", [(64, 64)] * 3, {}),
        ("Softmax", [(32, 32, 32)], {"axis": -1}),
        ("Softmax", [(32, 32, 32)], {"axis": 1}),
        ("LogSoftmax", [(32, 32, 32)], {"axis": 0}),
        ("LRN", [(2, 16, 16, 16)], {"size": 5}),
        ("Einsum", [(4, 32, 32), (4, 32, 32)], {"equation": "bij,bkj->bik"}),
        ("RNN", [(16, 4, 24), (1, 32, 24), (1, 32, 32)], {"hidden_size": 32}),
        ("Gemm", [(64, 64)] * 3, {"transA": 1}),
        ("MatMul", [(4, 64, 64)] * 2, {}),
        ("LayerNormalization", [(64, 64), (64,)], {}),
        ("Transpose", [(16, 16, 16)], {"perm": [2, 0, 1]}),
    ],
)
def test_working_memory(
    op_type: str, shapes: list[Shape], attributes: dict[str, object], tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    inputs = {
        f"x{i}": random.random(s) > 0.5
        if op_type == "Where" and i == 0
        else np.asarray(random.random(s), np.float32)
        for i, s in enumerate(shapes)
    }
    probe = helper.make_node(op_type, list(inputs), ["y"], name="probe", **attributes)
    figures = run_alone(tmp_path, [probe], inputs, {}, {"y": TensorProto.FLOAT})
    measured = int(figures["mem_in_use_peak"]) - int(figures["mem_bytes_in_use"])
    (output,) = figures["output_type_shape"][0].values()
    planned = workspace(
        op_type, attributes, [(s, 4) for s in shapes], [(tuple(output), 4)], threads=1
    )
    # The arena counts in pieces of 256 bytes.
    assert planned <= measured <= planned + 4 * 256


@pytest.mark.parametrize("opset", [12, 13])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
def test_softmax_along_a_middle_axis_is_transposed_since_opset_13(
    op_type: str, opset: int, tmp_path: Path
) -> None:
    """Before, the axes from there on are one."""
    x = np.random.default_rng(0).random((32, 32, 32), np.float32)
    probe = helper.make_node(op_type, ["x"], ["y"], name="probe", axis=1)
    figures = run_alone(tmp_path, [probe], {"x": x}, {}, {"y": TensorProto.FLOAT}, opset)
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in "xy"]
    graph = helper.make_graph([probe], "g", info[:1], info[1:])
    model = onnx.ModelProto(ir_version=8, graph=graph)
    model.opset_import.append(helper.make_opsetid("", opset))
    (use,) = allocate(load_model(model)).uses
    measured = int(figures["mem_in_use_peak"]) - int(figures["mem_bytes_in_use"])
    assert sum(use.scratch) == measured == (2 * x.nbytes if opset == 13 else 0)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("op_type", "gates", "attributes"),
    [("LSTM", 4, {}), ("GRU", 3, {}), ("GRU", 3, {"linear_before_reset": 1})],
)
def test_working_memory_of_gated_cells(
    op_type: str, gates: int, attributes: dict[str, Any], bias: bool, direction: str, tmp_path: Path
) -> None:
    """Every buffer is known; the arena counts each in pieces of 256 bytes."""
    count = 2 if direction == "bidirectional" else 1
    hidden, shapes = 32, [(16, 4, 24), (count, gates * 32, 24), (count, gates * 32, 32)]
    shapes += [(count, 2 * gates * 32)] * bias
    random = np.random.default_rng(0)
    inputs = {f"x{i}": random.random(s).astype(np.float32) for i, s in enumerate(shapes)}
    attributes = {"hidden_size": hidden, "direction": direction, **attributes}
    probe = helper.make_node(op_type, list(inputs), ["y"], name="probe", **attributes)
    figures = run_alone(tmp_path, [probe], inputs, {}, {"y": TensorProto.FLOAT})
    measured = int(figures["mem_in_use_peak"]) - int(figures["mem_bytes_in_use"])
    written = [((16, count, 4, 32), 4)]
    found = workspaces(op_type, attributes, [(s, 4) for s in shapes], written, 1)
    assert sum(-(-nbytes // 256) * 256 for nbytes in found) == measured


def test_threads_multiply_the_buffer_of_a_convolution() -> None:
    shapes = [((8, 3, 48, 48), 4), ((32, 3, 3, 3), 4)]
    one, three = (
        workspace("Conv", {"pads": [1] * 4}, shapes, [((8, 32, 48, 48), 4)], n) for n in (1, 3)
    )
    assert three == 3 * one > 0


def test_unknown_shapes_and_operators_count_nothing() -> None:
    assert workspace("Where", {}, [(None, 1)], [((4,), 4)], 1) == 0
    assert workspace("Unheard", {}, [((4,), 4)], [((4,), 4)], 1) == 0
    assert workspace("Conv", {}, [((4,), 4)], [((4,), 4)], 1, domain=NCHWC_DOMAIN) == 0
