"""Work counted from shapes, against products counted one by one and against other formulas."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from odtpack_simulator.measure.calibration import (
    CONTROL_FLOW,
    Calibration,
    NodeRun,
    calibrate,
    middle_mean,
    model_runs,
    typical_step,
)
from odtpack_simulator.measure.host import clock_hz
from odtpack_simulator.memory.allocation import allocate
from odtpack_simulator.memory.kernel_memory import ALIASES, IN_PLACE, NCHWC_DOMAIN, workspaces
from odtpack_simulator.memory.operator_work import (
    COMPUTE_BOUND,
    SMALL,
    Roof,
    Tensor,
    Work,
    operator_work,
)
from odtpack_simulator.replay.child.timing_run import grouped
from tests.model_text import add_initializers, kernels, session
from tests.simulator.graphs import load_model, weighted

Shape = tuple[int, ...]


def tensors(*shapes: Shape, itemsize: float = 4) -> list[Tensor]:
    return [Tensor(shape, itemsize) for shape in shapes]


def inferred_output(op_type: str, *shapes: Shape, **attributes: object) -> Shape:
    """Shape of the result as ONNX infers it."""
    inputs = ", ".join(f"float{[*shape]} i{index}" for index, shape in enumerate(shapes))
    names = ", ".join(f"i{index}" for index in range(len(shapes)))
    given = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    model = weighted(f"one ({inputs}) => (o) {{ o = {op_type} <{given}> ({names}) }}")
    found = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output[0]
    return tuple(size.dim_value for size in found.type.tensor_type.shape.dim)


def products_of_conv(x: Shape, w: Shape, out: Shape, groups: int) -> int:
    """Walk every output element, and every weight that it takes."""
    count = 0
    for _, channel, *_ in itertools.product(*map(range, out)):
        group = channel // (w[0] // groups)
        first = group * (x[1] // groups)
        for _, _ in itertools.product(
            range(first, first + x[1] // groups), itertools.product(*map(range, w[2:]))
        ):
            count += 1
    return count


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3), per_group=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)), stride=st.integers(1, 3),
    dilation=st.integers(1, 2), pad=st.integers(0, 2), batch=st.integers(1, 2),
)  # fmt: skip
def test_conv(
    groups, per_group, kernel, stride, dilation,
    pad, batch,
):  # fmt: skip
    x = (batch, groups * per_group[0], 7, 6)
    w = (groups * per_group[1], per_group[0], *kernel)
    out = inferred_output(
        "Conv", x, w, group=groups, strides=[stride] * 2, dilations=[dilation] * 2, pads=[pad] * 4
    )
    work = operator_work("Conv", tensors(x, w), tensors(out))
    assert work.flops == 2 * products_of_conv(x, w, out, groups)
    assert work.moved_bytes == 4 * (np.prod(x) + np.prod(w) + np.prod(out))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv_transpose_is_the_gradient_of_a_conv(groups, stride):
    """It has as many products as the Conv whose input gradient it is, where nothing is cut off."""
    x, w = (2, 4, 9, 9), (6, 4 // groups, 3, 3)
    forward = inferred_output("Conv", x, w, group=groups, strides=[stride] * 2)
    back = inferred_output("ConvTranspose", forward, w, group=groups, strides=[stride] * 2)
    assert back == x
    gradient = operator_work("ConvTranspose", tensors(forward, w), tensors(x))
    assert gradient.flops == operator_work("Conv", tensors(x, w), tensors(forward)).flops


@pytest.mark.parametrize("transA", [0, 1])
@pytest.mark.parametrize("transB", [0, 1])
def test_gemm(transA, transB):
    m, k, n = 3, 5, 7
    a, b = ((k, m) if transA else (m, k)), ((n, k) if transB else (k, n))
    out = inferred_output("Gemm", a, b, (n,), transA=transA, transB=transB)
    work = operator_work("Gemm", tensors(a, b, (n,)), tensors(out))
    assert work.flops == 2 * m * k * n
    assert work.moved_bytes == 4 * (m * k + k * n + n + m * n)
    assert operator_work("FusedGemm", tensors(a, b), tensors(out)).flops == 2 * m * k * n


@pytest.mark.parametrize(("a", "b"), [
    ((3, 5), (5, 7)), ((2, 3, 5), (5, 7)), ((3, 5), (4, 5, 7)), ((2, 1, 3, 5), (1, 4, 5, 7)),
    ((5,), (5, 7)), ((3, 5), (5,)), ((5,), (5,)),
])  # fmt: skip
def test_matmul_with_broadcasting(a, b):
    result = np.matmul(np.ones(a), np.ones(b))  # of ones, every element is its number of products
    work = operator_work("MatMul", tensors(a, b), tensors(result.shape))
    assert work.flops == 2 * result.sum()


@pytest.mark.parametrize("transA", [0, 1])
@pytest.mark.parametrize("transBatchA", [0, 1])
def test_fused_matmul_without_its_attributes(transA, transBatchA):
    batch, m, k, n = 2, 3, 5, 7
    a = [batch, k, m] if transA else [batch, m, k]
    if transBatchA:
        a[0], a[1] = a[1], a[0]
    work = operator_work("FusedMatMul", tensors(tuple(a), (batch, k, n)), tensors((batch, m, n)))
    assert work.flops == 2 * batch * m * k * n


@pytest.mark.parametrize("a", [(3, 5), (5, 3), (1, 3, 5)])
def test_fused_matmul_that_broadcasts(a):
    work = operator_work("FusedMatMul", tensors(a, (4, 5, 7)), tensors((4, 3, 7)))
    assert work.flops == 2 * 4 * 3 * 5 * 7


@pytest.mark.parametrize(("op_type", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent(op_type, gates, directions):
    steps, batch, size, hidden = 6, 2, 3, 5
    first, second = (directions, gates * hidden, size), (directions, gates * hidden, hidden)
    inputs = tensors((steps, batch, size), first, second)
    result = (steps, directions, batch, hidden)
    products = 0
    for _ in range(steps * directions * gates):
        products += batch * hidden * size + batch * hidden * hidden
    assert operator_work(op_type, inputs, tensors(result)).flops == 2 * products


def test_attention_is_its_matrix_products():
    batch, heads, queries, keys, depth, value_depth = 2, 4, 6, 9, 8, 5
    query, scored = (batch, heads, queries, depth), (batch, heads, queries, keys)
    value, found = (batch, heads, keys, value_depth), (batch, heads, queries, value_depth)
    products = [
        operator_work("MatMul", tensors(*inputs), tensors(result)).flops
        for *inputs, result in (
            (query, (batch, heads, depth, keys), scored),
            (scored, value, found),
        )
    ]
    four = query, (batch, heads, keys, depth), value
    three = tuple((batch, n, heads * d) for n, d in
                  ((queries, depth), (keys, depth), (keys, value_depth)))  # fmt: skip
    joined = (batch, queries, heads * value_depth)
    for op_type, inputs, result in (
        ("Attention", four, found), ("Attention", three, joined),
        ("MultiHeadAttention", three, joined),
    ):  # fmt: skip
        work = operator_work(op_type, tensors(*inputs), tensors(result))
        assert work.flops == products[0] + products[1]


def test_packed_attention():
    """Three projections, then scores and values of all heads together."""
    batch, length, size, inner = 2, 6, 8, 12
    work = operator_work(
        "Attention",
        tensors((batch, length, size), (size, 3 * inner), (3 * inner,)),
        tensors((batch, length, inner)),
    )
    projections = 3 * batch * length * size * inner
    assert work.flops == 2 * (projections + 2 * batch * length * length * inner)


def test_quantized_products():
    x, w, out = (1, 4, 5, 5), (6, 4, 3, 3), (1, 6, 3, 3)
    plain = operator_work("Conv", tensors(x, w), tensors(out)).flops
    assert operator_work("ConvInteger", tensors(x, w), tensors(out)).flops == plain
    scaled = tensors(x, (), (), w, (), (), (), (), itemsize=1)
    assert operator_work("QLinearConv", scaled, tensors(out, itemsize=1)).flops == plain


@pytest.mark.parametrize(("op_type", "inputs", "outputs", "nbytes"), [
    ("Add", [(10, 10), (10,)], [(10, 10)], 4 * 210),
    ("Reshape", [(10, 10), (2,)], [(100,)], 0),
    ("Shape", [(1000, 1000)], [(2,)], 8),
    ("Gather", [(1000, 10), (3,)], [(3, 10)], 4 * (30 + 30 + 3)),
    ("Slice", [(1000, 10), (1,), (1,)], [(5, 10)], 4 * (50 + 50 + 2)),
    ("ScatterND", [(1000, 10), (3, 1), (3, 10)], [(1000, 10)], 4 * (3 + 30 + 30)),
    ("ConstantOfShape", [], [(8, 8)], 4 * 64),
    ("ReduceSum", [(10, 10)], [(10, 1)], 4 * 110),
])  # fmt: skip
def test_least_traffic(op_type, inputs, outputs, nbytes):
    assert operator_work(op_type, tensors(*inputs), tensors(*outputs)) == Work(None, nbytes)


def test_bytes_per_element_count():
    half = operator_work("Relu", tensors((10,), itemsize=2), tensors((10,), itemsize=2))
    assert half.moved_bytes == 40


@pytest.mark.parametrize("op_type", ["Gemm", "MatMul", "FusedMatMul", "LSTM", "Attention", "Conv"])
@pytest.mark.parametrize("shapes", [[], [()], [(0, 3)], [(2,)], [(0, 3), (3, 0)]])
def test_odd_shapes_have_no_arithmetic_or_none_at_all(op_type, shapes):
    """A profile comes from a model that nobody here wrote."""
    work = operator_work(op_type, tensors(*shapes), tensors((0, 0)))
    assert work.flops in (None, 0)
    assert work.moved_bytes >= 0


# The roofline, and reading what ONNX Runtime's profile says about nodes.

ROOF = Roof(flops=100e9, bandwidth=20e9)


class TestRoof:
    def test_the_ridge_parts_the_classes(self):
        assert ROOF.ridge == 5
        assert ROOF.bound("MatMul", Work(5e6, 1e6)) == "compute"
        assert ROOF.bound("MatMul", Work(4.9e6, 1e6)) == "memory"

    def test_a_machine_with_little_bandwidth_is_bound_by_it(self):
        assert Roof(100e9, 10e9).bound("Conv", Work(8e6, 1e6)) == "memory"
        assert Roof(50e9, 10e9).bound("Conv", Work(8e6, 1e6)) == "compute"

    def test_the_slower_roof_counts(self):
        assert ROOF.seconds(Work(1e9, 1e6)) == pytest.approx(0.01)
        assert ROOF.seconds(Work(1e6, 1e9)) == pytest.approx(0.05)
        assert ROOF.seconds(Work(None, 1e9)) == pytest.approx(0.05)

    def test_work_shorter_than_the_runtime_is_bound_by_neither(self):
        small = Work(100.0, 400.0)
        assert ROOF.bound("Gemm", small, 1e-6) == "other"
        assert ROOF.bound("Add", Work(None, 400.0), 1e-6) == "other"
        assert ROOF.bound("Add", Work(None, 400e3), 1e-6) == "memory"

    def test_the_list_decides_where_the_arithmetic_is_unknown(self):
        assert ROOF.bound("Einsum", Work(None, 1e6)) == "compute"
        assert ROOF.bound("Einsum", Work(None, 10.0), 1e-6) == "compute"
        assert ROOF.bound("ReduceSum", Work(None, 1e6)) == "memory"
        assert ROOF.bound("Shape", Work(None, 1e6)) == "other"

    def test_lists_do_not_overlap(self):
        assert not COMPUTE_BOUND & SMALL
        assert not CONTROL_FLOW & (COMPUTE_BOUND | SMALL)


def nodes(*times: float, op_type: str = "Add", nbytes: float = 8) -> list[NodeRun]:
    return [NodeRun(f"n{i}", op_type, us, Work(None, nbytes)) for i, us in enumerate(times)]


class TestTypicalStep:
    def test_nodes_take_the_middle_of_their_times(self):
        """The first step is left out; one that was interrupted does not show."""
        runs = [nodes(90, 90), nodes(1, 2), nodes(1, 900), nodes(2, 2), nodes(2, 2)]
        found = typical_step(runs, 5)
        assert [node.us for node in found] == [1.5, 2]

    def test_runs_of_one_step_belong_together(self):
        """An optimizer that runs chunk by chunk."""
        found = typical_step([nodes(9), nodes(9), nodes(1), nodes(2), nodes(1), nodes(2)], 3)
        assert [node.us for node in found] == [1, 2]

    def test_steps_that_differ(self):
        """A loop that ran longer: the step in the middle stands for all."""
        runs = [nodes(9), nodes(1, 1), nodes(1, 1, 1, 1), nodes(1, 1, 1)]
        assert len(typical_step(runs, 4)) == 3

    def test_middle_mean(self):
        assert middle_mean([7]) == 7
        assert middle_mean([1, 3]) == 2
        assert middle_mean([0, 2, 4, 100]) == 3


class TestGrouping:
    def test_equal_work_is_put_together(self):
        rows = grouped([*nodes(1, 2), *nodes(5, nbytes=16), *nodes(7, op_type="Mul")])
        assert sorted((r["op_type"], r["calls"], r["us"], r["moved_bytes"]) for r in rows) == [
            ("Add", 1, 5, 16), ("Add", 2, 3, 16), ("Mul", 1, 7, 8),
        ]  # fmt: skip

    def test_too_many_kinds_are_told_by_operator(self, monkeypatch):
        monkeypatch.setattr("odtpack_simulator.replay.child.timing_run._MAX_ROWS", 2)
        many = [node for us in range(1, 6) for node in nodes(us, nbytes=us)]
        rows = grouped([*many, *nodes(0.5, op_type="Mul")])
        assert [(r["op_type"], r["us"], r["moved_bytes"]) for r in rows] == [
            ("Add", 5, 5), ("Add", 4, 4), ("Add", 6, 6), ("Mul", 0.5, 8),
        ]  # fmt: skip
        assert rows[2]["calls"] == 3


def test_nodes_of_a_real_profile(tmp_path):
    """A convolution and what follows it inside an If: shapes and types as they ran."""
    branch = "g () => (r) { [relu] r = Relu (y) }"
    text = f"""g (float[n, 4, 9, 9] x, float[6, 4, 3, 3] w, bool c) => (float[n, 6, a, b] z) {{
        [conv] y = Conv <strides = [2, 2]> (x, w)
        z = If (c) <then_branch = {branch}, else_branch = {branch}>
    }}"""
    feeds = {
        "x": np.zeros((2, 4, 9, 9), np.float32), "w": np.zeros((6, 4, 3, 3), np.float32),
        "c": np.array(True),
    }  # fmt: skip
    opened = profiled(weighted(text), tmp_path)
    for _ in range(3):
        opened.run(None, feeds)
    runs = model_runs(Path(opened.end_profiling()))
    assert len(runs) == 3
    for run in runs:
        assert [(node.node, node.op_type) for node in run] == [("conv", "Conv"), ("relu", "Relu")]
        conv, relu = (node.work for node in run)
        assert conv.flops == 2 * (2 * 6 * 4 * 4) * (4 * 3 * 3)
        assert conv.moved_bytes == 4 * (2 * 4 * 81 + 6 * 4 * 9 + 2 * 6 * 16)
        assert relu == Work(None, 4 * 2 * (2 * 6 * 16))


def test_calibration_of_this_machine():
    found = calibrate(1)
    assert found.core_flops == found.gemm_flops > 0
    assert found.copy_bandwidth > 0
    assert found.roof.bandwidth == 2 * found.copy_bandwidth
    assert min(found.profile_us, found.node_us) >= 0
    sent = json.loads(json.dumps({name: getattr(found, name) for name in found.__slots__}))
    assert Calibration(**sent) == found


def test_the_clock_is_a_clock_or_unknown():
    found = clock_hz()
    assert found is None or 1e8 < found < 1e10


# Working memory and buffer sharing of single operators, as ONNX Runtime's arena counts them.

NOT_IN_PLACE = [
    *("Abs", "Exp", "Erf", "Log", "Neg", "Reciprocal", "Sqrt", "Sin"),
    *("Add", "Div", "Max", "Mul", "Pow", "Sub", "Transpose", "LayerNormalization"),
]


def run_alone(
    folder: Path, nodes: list[onnx.NodeProto], inputs: dict[str, np.ndarray],
    constants: dict[str, np.ndarray], outputs: dict[str, int], opset: int = 17,
) -> dict[str, Any]:  # fmt: skip
    """The profile's memory figures of the node called ``probe``, from the first run."""
    info, kind_of = helper.make_tensor_value_info, helper.np_dtype_to_tensor_dtype
    given = [info(name, kind_of(each.dtype), each.shape) for name, each in inputs.items()]
    made = [info(name, kind, None) for name, kind in outputs.items()]
    graph = helper.make_graph(nodes, "probe", given, made)
    model = onnx.ModelProto(ir_version=8, graph=graph)
    add_initializers(model, constants)
    model.opset_import.append(helper.make_opsetid("", opset))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    opened = profiled(model, folder)
    opened.run(None, inputs)
    figures: dict[str, Any] = next(
        each["args"] for each in kernels(opened) if each["name"] == "probe"
    )
    if "mem_in_use_peak" not in figures or "mem_requested_in_use_delta" not in figures:
        pytest.fail("this ONNX Runtime does not write memory to its profiles")
    return figures


def profiled(model: onnx.ModelProto, folder: Path) -> onnxruntime.InferenceSession:
    """A session of the model as it stands, with one thread and a profile."""
    prefix = str(folder / "profile")
    return session(
        model, "off", enable_mem_pattern=False, enable_profiling=True, profile_file_prefix=prefix
    )


CONSTANTS: dict[str, dict[str, np.ndarray]] = {
    "LayerNormalization": {"scale": np.ones(64, np.float32)},
    "Reshape": {"shape": np.array([4096], np.int64)},
    "ScatterElements": {"i": np.zeros((1, 1), np.int64), "u": np.zeros((1, 1), np.float32)},
    "Unsqueeze": {"axes": np.array([0], np.int64)},
}


@pytest.mark.parametrize("op_type", [*sorted(IN_PLACE | ALIASES), *NOT_IN_PLACE])
def test_shared_buffers(op_type, tmp_path):
    """An operator that takes its input's buffer adds nothing to the bytes in use."""
    binary = op_type in ("Add", "Div", "Max", "Mul", "Pow", "Sub")
    operands = ["a", "b"] if binary else ["a"]
    constants = CONSTANTS.get(op_type, {})
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


def used(figures: dict[str, Any]) -> int:
    """Bytes that the arena had in use beyond what was there before."""
    return int(figures["mem_in_use_peak"]) - int(figures["mem_bytes_in_use"])


def workspace(*of: Any, **more: Any) -> int:
    """Bytes of all buffers of an operator together."""
    return sum(workspaces(*of, **more))


def conv(image: Shape, weight: Shape, **attributes: object) -> tuple[str, list[Shape], dict]:
    return "Conv", [image, weight], attributes


@pytest.mark.parametrize(("op_type", "shapes", "attributes"), [
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
])  # fmt: skip
def test_working_memory(op_type, shapes, attributes, tmp_path):
    random = np.random.default_rng(0)
    inputs = {f"x{i}": np.asarray(random.random(s), np.float32) for i, s in enumerate(shapes)}
    if op_type == "Where":
        inputs["x0"] = inputs["x0"] > 0.5
    probe = helper.make_node(op_type, list(inputs), ["y"], name="probe", **attributes)
    figures = run_alone(tmp_path, [probe], inputs, {}, {"y": TensorProto.FLOAT})
    measured = used(figures)
    (output,) = figures["output_type_shape"][0].values()
    planned = workspace(
        op_type, attributes, [(s, 4) for s in shapes], [(tuple(output), 4)], threads=1
    )
    # The arena counts in pieces of 256 bytes.
    assert planned <= measured <= planned + 4 * 256


@pytest.mark.parametrize("opset", [12, 13])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
def test_softmax_along_a_middle_axis_is_transposed_since_opset_13(op_type, opset, tmp_path):
    """Before, the axes from there on are one."""
    x = np.random.default_rng(0).random((32, 32, 32), np.float32)
    probe = helper.make_node(op_type, ["x"], ["y"], name="probe", axis=1)
    figures = run_alone(tmp_path, [probe], {"x": x}, {}, {"y": TensorProto.FLOAT}, opset)
    shape = [*x.shape]
    model = weighted(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float{shape} x) => (float{shape} y) '
        f"{{ y = {op_type} <axis = 1> (x) }}"
    )
    (use,) = allocate(load_model(model)).uses

    measured = used(figures)
    assert sum(use.scratch) == measured == (2 * x.nbytes if opset == 13 else 0)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("op_type", "gates", "attributes"),
    [("LSTM", 4, {}), ("GRU", 3, {}), ("GRU", 3, {"linear_before_reset": 1})],
)
def test_working_memory_of_gated_cells(op_type, gates, attributes, bias, direction, tmp_path):
    """Every buffer is known; the arena counts each in pieces of 256 bytes."""
    count = 2 if direction == "bidirectional" else 1
    hidden, shapes = 32, [(16, 4, 24), (count, gates * 32, 24), (count, gates * 32, 32)]
    shapes += [(count, 2 * gates * 32)] * bias
    random = np.random.default_rng(0)
    inputs = {f"x{i}": random.random(s).astype(np.float32) for i, s in enumerate(shapes)}
    attributes = {"hidden_size": hidden, "direction": direction, **attributes}
    probe = helper.make_node(op_type, list(inputs), ["y"], name="probe", **attributes)
    figures = run_alone(tmp_path, [probe], inputs, {}, {"y": TensorProto.FLOAT})
    measured = used(figures)
    written = [((16, count, 4, 32), 4)]
    found = workspaces(op_type, attributes, [(s, 4) for s in shapes], written, 1)
    assert sum(-(-nbytes // 256) * 256 for nbytes in found) == measured


def test_threads_multiply_the_buffer_of_a_convolution():
    shapes = [((8, 3, 48, 48), 4), ((32, 3, 3, 3), 4)]
    one, three = (
        workspace("Conv", {"pads": [1] * 4}, shapes, [((8, 32, 48, 48), 4)], n) for n in (1, 3)
    )
    assert three == 3 * one > 0


def test_unknown_shapes_and_operators_count_nothing():
    assert workspace("Where", {}, [(None, 1)], [((4,), 4)], 1) == 0
    assert workspace("Unheard", {}, [((4,), 4)], [((4,), 4)], 1) == 0
    assert workspace("Conv", {}, [((4,), 4)], [((4,), 4)], 1, domain=NCHWC_DOMAIN) == 0
