"""What is written takes what was planned, whatever the model's inputs and however deep it is."""

import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from benchmarks.fidelity import models
from odtpack import losses
from odtpack.graph.graphs import Ops, dims_of
from odtpack.memory import compile as memory_compile
from odtpack.memory.compile import gradients_at_once, weights_late
from odtpack.memory.schedule import ControlEdge, SizeNames, Step, Timeline, arrange, places_of
from odtpack.model.loading import load_model
from odtpack.package.task import Graphs, Task
from odtpack.package.training import build_graphs
from odtpack.spec import MemorySpec
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value, load_runtime_graph
from tests.model_text import LEVELS, kernels, parsed, session

WIDTH = 128


def gated(layers: int, *, masked: bool = False) -> onnx.ModelProto:
    """Layers of x + tanh(a sigmoid(a)), a = W x; maybe with a mask for the last one."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.normal(0, 0.06, (WIDTH, WIDTH)) for i in range(layers)}
    weights |= {"head": rng.normal(0, 0.06, (WIDTH, 10)), "zero": np.zeros(())}
    body = " ".join(
        f"a{i} = MatMul(h{i}, w{i}) s{i} = Sigmoid(a{i}) g{i} = Mul(a{i}, s{i}) "
        f"t{i} = Tanh(g{i}) h{i + 1} = Add(h{i}, t{i})"
        for i in range(layers)
    )
    last = f"h{layers}"
    if masked:
        body, last = f"{body} m = Where(mask, {last}, zero)", "m"
    more = ", bool[N, 64, 1] mask" if masked else ""
    return parsed(
        f"gated (float[N, 64, {WIDTH}] h0{more}) => (float[N, 10] logits) {{ {body} "
        f"pooled = ReduceMean <axes = [1], keepdims = 0> ({last}) logits = MatMul(pooled, head) }}",
        **{name: value.astype(np.float32) for name, value in weights.items()},
    )


def build(model: onnx.ModelProto, memory: MemorySpec) -> Graphs:
    names = tuple(t.name for t in model.graph.initializer if t.name != "zero")
    loss = losses.make_loss("cross_entropy")
    return build_graphs(Task(load_model(model), names, (), loss, memory=memory))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("share", [None, 0.6])
def test_takes_what_was_planned(masked, share, monkeypatch):
    """A mask is a Boolean input, as the flag is that resets gradients."""
    model = gated(6, masked=masked)
    kept = build(model, MemorySpec(batch=16, limit=1 << 40)).memory
    assert kept is not None
    chosen: list[Timeline] = []
    choose = memory_compile.choose

    def noted(*arguments: Any, **options: Any) -> Timeline:
        chosen.append(choose(*arguments, **options))
        return chosen[-1]

    monkeypatch.setattr(memory_compile, "choose", noted)
    spec = MemorySpec(batch=16)
    if share is not None:
        spec = MemorySpec(batch=16, limit=int(share * kept.before), slowdown=1.0)
    report = build(model, spec).memory
    assert report.decisions
    assert report.after <= 1.01 * chosen[-1].peak
    assert report.after <= (share or 0.9) * report.before


def test_depth_is_no_limit():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 130)
    try:
        report = build(gated(140), MemorySpec(batch=8)).memory
    finally:
        sys.setrecursionlimit(before)
    assert report.decisions


def test_a_long_chain_from_a_weight_waits_until_it_is_read():
    values = {"x": Value("x", 4, ("n",), (4,)), "w": Value("w", 4, (4,), (4,))}
    names = [f"v{i}" for i in range(5000)]
    nodes = [Node("first", "Neg", "", ("x",), ("h",), {})]
    for before, name in zip(["w", *names], names, strict=False):
        nodes.append(Node(name, "Sin", "", (before,), (name,), {}))
    nodes.append(Node("last", "Add", "", ("h", names[-1]), ("loss",), {}))
    graph = RuntimeGraph(("x", "w"), ("loss",), (*nodes[1:-1], nodes[0], nodes[-1]), values, {})
    assert [node.name for node in weights_late(graph, ["w"]).nodes] == [n.name for n in nodes]


def test_a_decision_counts_all_outputs_of_a_node():
    sizes = {"x": 8192, "a": 65536, "b": 128, "c": 16384, "loss": 1, "g": 8}
    values = {name: Value(name, 4, (name,), (size,)) for name, size in sizes.items()}
    parts = ("a", "b", "c")
    nodes = (
        Node("split", "Split", "", ("x",), parts, {}),
        Node("read", "Sum", "", parts, ("loss",), {}),
        Node("again", "Sum", "", parts, ("g",), {}),
    )
    step = Step(RuntimeGraph(("x",), ("loss", "g"), nodes, values, {}))
    (decision,) = memory_compile._decisions(step, parts, {})
    assert decision.nbytes == 4 * (65536 + 128 + 16384)
    assert decision.seconds == step.seconds[0]


# ONNX Runtime executes what an edge holds back after what it waits for, on every level.


def executed(path: Path, level: str, feeds: dict[str, np.ndarray]) -> tuple[list[str], np.ndarray]:
    """Names of the nodes in the order of ONNX Runtime's own profile, and the first output."""
    prefix = str(path.with_suffix(""))
    opened = session(onnx.load(path), level, enable_profiling=True, profile_file_prefix=prefix)
    result = opened.run(None, feeds)[0]
    return [each["name"] for each in kernels(opened)], result


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", ["rows", 3])
def test_same_nodes_run_twice_and_late(level, rows, tmp_path):
    """Without the edge, elimination of common subexpressions leaves one Tanh, at the start."""
    x = ir.val("x", ir.DataType.FLOAT, [rows, 4])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17}, name="twice")
    op = Ops(graph)
    first = op.emit("Tanh", [x], name="first")[0]
    first.shape = x.shape
    late = op.emit("Sin", [first], name="late")[0]
    late.shape = x.shape
    view = ControlEdge(op, lambda: op.Size(late), SizeNames()).view(x, dims_of(x))
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


# ONNX Runtime makes of the order of a file the order that was planned.


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
def test_gradients_at_once(biases_first, tmp_path):
    path = tmp_path / "model.onnx"
    ir.save(backward(6, biases_first), path)
    graph = gradients_at_once(load_runtime_graph(path, {}))
    names = [node.name for node in graph.nodes]
    for layer in range(5):
        assert names.index(f"sum{layer}") == names.index(f"chain{layer}") + 1
    step = Step(graph)
    assert step.timeline().peak <= Step(load_runtime_graph(path, {})).timeline().peak


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("biases_first", [False, True])
def test_profile_shows_the_planned_order(level, biases_first, tmp_path):
    model = backward(6, biases_first)
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    planned: Timeline = Step(gradients_at_once(load_runtime_graph(path, {}))).timeline()
    arrange(model.graph, places_of(model.graph, planned, {}))
    ir.save(model, path)
    found, _ = executed(path, level, {"x": np.ones((8, 64), np.float32)})
    wanted = [node.name for node in planned.nodes]
    assert [name for name in found if name in wanted] == wanted


# ONNX Runtime 1.23 to 1.30 joins views that follow one another where all sizes are known.
#
# It cannot load a model in which the first of them computes its shape.


@pytest.mark.parametrize("name", ["keyword-gru", "mobilenet-v3"])
def test_no_view_of_computed_shape_comes_before_one_of_known_size(name, tmp_path):
    built = models.build(models.CASES[name], tmp_path)
    graph = onnx.load(built.folder / "package" / "training_model.onnx").graph
    constants = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    views = [
        node.output[0]
        for node in graph.node
        if node.op_type == "Reshape" and node.input[1] not in constants
    ]
    assert views  # something is computed again
    for view in views:
        readers = [node for node in graph.node if view in node.input]
        if len(readers) != 1 or readers[0].input[0] != view:
            continue
        if readers[0].op_type == "Reshape" and readers[0].input[1] in constants:
            assert not (constants[readers[0].input[1]] > 0).all(), view
        if readers[0].op_type in ("Squeeze", "Unsqueeze"):
            assert any(dim.dim_param for dim in shapes.get(view, ())), view
