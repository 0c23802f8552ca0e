"""What is read from a graph as ONNX Runtime runs it: shapes that it leaves open, and constants."""

import itertools
import random
import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from odtpack.build import build_package
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.allocation import allocate
from odtpack_simulator.memory.execution_order import execution_order, rename_casts, sort_saved_model
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.missing_shapes import Typed, fill_in, nchwc_block
from odtpack_simulator.memory.runtime_graph import (
    Labels,
    Node,
    RuntimeGraph,
    Value,
    load_runtime_graph,
)
from odtpack_simulator.memory.session_memory import constant_bytes, loading_bytes, session_bytes
from tests import zoo
from tests.model_text import kernels, session
from tests.refused import refused
from tests.simulator.graphs import load_model, weighted, zeros


def test_constants():
    """A weight that one kernel rearranges and another reads as it is exists twice."""
    loaded = load_model(weighted(
        """g (float[64, 64] x) => (float[64, 32] y) {
            a = MatMul (x, w)
            b = Mul (a, w)
            y = MatMul (b, v)
        }""",
        {"w": np.ones((64, 64), np.float32), "v": np.ones((64, 32), np.float32)},
    ))  # fmt: skip
    assert constant_bytes(loaded) == 2 * 64 * 64 * 4 + 64 * 32 * 4
    assert loading_bytes(loaded) == 64 * 64 * 4


def test_kernels_share_a_rearranged_constant():
    """Two products with one matrix keep one copy; with it transposed, another, in whole panels."""
    text = """g (float[4, 36] x, float[4, 36] a2, float[4, 64] c) =>
        (float[4, 64] a, float[4, 64] b, float[4, 36] d) {
            a = Gemm (x, w)
            b = Gemm (a2, w)
            d = Gemm <transB = 1> (c, w)
        }"""
    loaded = load_model(weighted(text, {"w": np.ones((36, 64), np.float32)}))
    assert constant_bytes(loaded) == 36 * 64 * 4 + 64 * 48 * 4


def test_a_branch_keeps_a_constant_and_its_rearranged_copy():
    """Its zeros are folded; in the graph around them, only the copy would stay."""
    graph = load_model(
        """g (bool c, float[4, 64] x) => (float[4, 64] y) <int64[2] size = {64, 64}> {
            y = If (c) <
                then_branch = t () => (float[4, 64] a) {
                    zeros = ConstantOfShape (size)
                    a = MatMul (x, zeros)
                },
                else_branch = e () => (float[4, 64] b) { b = Identity (x) }
            >
        }"""
    )
    assert constant_bytes(graph) == 2 * 64 * 64 * 4


def test_a_stored_body_keeps_its_constants(tmp_path):
    model = weighted("""g (bool c, float[4] x) => (float[4] y) {
        y = If (c) <
            then_branch = t () => (float[4] a) { a = Add (x, w) },
            else_branch = e () => (float[4] b) { b = Identity (x) }
        >
    }""")
    weight = onnx.numpy_helper.from_array(np.ones(4, np.float32), "w")
    onnx.save(model, tmp_path / "without.onnx")
    model.graph.node[0].attribute[0].g.initializer.append(weight)
    onnx.save(model, tmp_path / "model.onnx")
    graph = load_model(model)
    kept, without = (session_bytes(tmp_path / f"{n}.onnx", graph) for n in ("model", "without"))
    assert kept - without == weight.ByteSize()


@pytest.mark.parametrize("flags", list(itertools.product((0, 1), repeat=4)))
def test_shape_of_a_fused_product(flags):
    """As ONNX Runtime computes it, for every combination of transpositions."""

    def store(array: np.ndarray, swapped: int, batch_last: int) -> np.ndarray:
        array = np.swapaxes(array, -1, -2) if swapped else array
        return np.ascontiguousarray(np.moveaxis(array, -2, 0) if batch_last else array)

    feeds = {
        "a": store(np.zeros((2, 3, 5, 7), np.float32), flags[0], flags[2]),
        "b": store(np.zeros((2, 3, 7, 4), np.float32), flags[1], flags[3]),
    }
    given = ", ".join(f"trans{name} = {flag}" for name, flag in
                      zip(("A", "B", "BatchA", "BatchB"), flags, strict=True))  # fmt: skip
    a, b = ([*array.shape] for array in feeds.values())
    model = weighted(
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> '
        f"g (float{a} a, float{b} b) => (y) {{ y = com.microsoft.FusedMatMul <{given}> (a, b) }}"
    )
    (result,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    found: dict[str, Typed] = {n: (TensorProto.FLOAT, v.shape) for n, v in feeds.items()}
    fill_in(model.graph.node, 17, {}, found, set())
    assert found["y"] == (TensorProto.FLOAT, result.shape)


def test_sizes_that_onnx_runtime_does_not_know():
    """A flag times zeros leaves sizes as they are; ONNX Runtime plans by the name."""
    view = load_model(
        """g (float[6, 8] x, bool[1] flag) => (float[m, n] out)
        <int64[2] zeros = {0, 0}, float["own", 8] view> {
            number = Cast <to = 7> (flag)
            shape = Mul (number, zeros)
            view = Reshape (x, shape)
            out = Exp (view)
        }"""
    ).values["view"]
    assert view.dims == ("own", 8)
    assert view.shape == (6, 8)


def test_the_body_of_a_scan_has_the_shapes_of_its_slices():
    """Names that its declared inputs have stand for sizes of the whole."""
    model = weighted("""g (float[6, 4, 2] x, float[2] s) => (float[a] t, float[6, b, c] y) {
        t, y = Scan <num_scan_inputs = 1, body = turn (float[n] u, float[p, q] v)
            => (float[n] w, float[p, q] z) { z = Exp(v) e = Add(z, u)
            w = ReduceSum <keepdims = 0> (e, axis) }> (s, x)
    }""")
    body = model.graph.node[0].attribute[1].g
    body = body if body.node else model.graph.node[0].attribute[0].g
    body.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis"))
    found: dict[str, Typed] = {"x": (TensorProto.FLOAT, (6, 4, 2)), "s": (TensorProto.FLOAT, (2,))}
    fill_in(model.graph.node, 17, {}, found, set())
    assert found["y"] == (TensorProto.FLOAT, (6, 4, 2))
    loaded = load_model(model)
    (scan,) = (node for node in loaded.nodes if node.op_type == "Scan")
    (inside,) = scan.subgraphs.values()
    assert [inside.values[name].shape for name in inside.inputs] == [(2,), (4, 2)]


LOOPS = {
    "a constant": ("n = Constant <value_int = 5> ()", "n", "Tanh (s)", (5, 3, 4)),
    "a size of an input": ("n = Gather <axis = 0> (sizes, zero)", "n", "Tanh (s)", (3, 3, 4)),
    "more than there are numbers": (
        "n = Constant <value_int = 9223372036854775807> ()", "n", "Tanh (s)", None
    ),
    "the most that 32 bits hold": (
        "n = Constant <value_int = 2147483647> ()", "n", "Tanh (s)", None
    ),
    "data": ("n = ReduceMax <keepdims = 0> (count)", "n", "Tanh (s)", None),
    "no number": ("n = Identity (zero)", "", "Tanh (s)", None),
    "a state that grows": (
        "n = Constant <value_int = 5> ()", "n", "Concat <axis = 0> (s, s)", None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_keeps(name):
    """As many slices as it turns, if shapes say how often; else the plan knows no bound."""
    trip, most, state, shape = LOOPS[name]
    text = f"""g (float[batch, 4] x, int64[2] count) => (float[a, b] last, float[c] out) {{
        sizes = Shape (x)
        zero = Constant <value_int = 0> ()
        {trip}
        last, all = Loop ({most}, , x) <body = turn (int64 i, bool on, s)
            => (bool go, float[p, q] t, float[u, v] y) {{
            go = Identity (on) t = {state} y = Exp (t)
        }}>
        out = ReduceMean <axes = [0, 1], keepdims = 0> (all)
    }}"""
    graph = load_model(text, {"x": (3, 4)})
    assert graph.values["all"].shape == shape
    assert allocate(graph).unbounded == (shape is None)


def test_results_of_a_function_have_the_shapes_that_its_body_gives():
    """A native kernel's, behind a value whose shape ONNX Runtime does not know."""
    model = weighted(
        """<ir_version: 8, opset_import: ["": 17, "odtpack.native": 1]>
        g (float[2, 3, 8] x, float[2, 3, 8] y) => (float[a, b, c] scale, float[d, e] product) {
            scale, product = odtpack.native.Kernel0 (x, y)
        }
        <domain: "odtpack.native", opset_import: ["": 17]>
        Kernel0 (a, b) => (root, sum) {
            mean = ReduceMean <axes = [-1]> (a)
            root = Sqrt (mean)
            scaled = Mul (b, root)
            sum = ReduceSum <keepdims = 0> (scaled, axis)
        }"""
    )
    axis = onnx.numpy_helper.from_array(np.array([1]))
    model.functions[0].node.insert(0, helper.make_node("Constant", [], ["axis"], value=axis))
    functions = {(each.domain, each.name): each for each in model.functions}
    found: dict[str, Typed] = dict.fromkeys(("x", "y"), (TensorProto.FLOAT, (2, 3, 8)))
    fill_in(model.graph.node, 17, {}, found, set(), functions=functions)
    feeds = dict.fromkeys(("x", "y"), np.ones((2, 3, 8), np.float32))
    for name, array in zip(
        ("scale", "product"), ReferenceEvaluator(model).run(None, feeds), strict=True
    ):
        assert found[name] == (TensorProto.FLOAT, np.shape(array))


@pytest.mark.parametrize("axis", [0, -2])
def test_a_window_whose_place_depends_on_data(axis):
    """It has as many rows wherever it begins."""
    nodes = [
        helper.make_node("Add", ["start", "length"], ["end"]),
        helper.make_node("Slice", ["x", "start", "end", "axes"], ["y"]),
    ]
    constants = {
        name: onnx.numpy_helper.from_array(np.array(value), name)
        for name, value in (("length", [5]), ("axes", [axis]))
    }
    found: dict[str, Typed] = {"x": (TensorProto.FLOAT, (9, 4)), "start": (TensorProto.INT64, (1,))}
    fill_in(nodes, 17, constants, found, set())
    assert found["y"] == (TensorProto.FLOAT, (5, 4))
    constants["start"] = onnx.numpy_helper.from_array(np.array([6]), "start")
    found = {"x": found["x"]} | dict.fromkeys(constants, (TensorProto.INT64, (1,)))
    fill_in(nodes, 17, constants, found, set())
    assert found["y"] == (TensorProto.FLOAT, (3, 4))  # what is left from there on


def test_axes_that_were_broadcast():
    """The sum over axes that the graph finds by comparing shapes has a known shape."""
    graph = load_model(
        """g (float[batch, 6, 8] x, float[1, 6, 8] y) => (float[a, b, c] out) {
            one = Constant <value_ints = [1]> ()
            all = Constant <value_ints = [-1]> ()
            sx = Shape (x)
            sy = Shape (y)
            narrow = Equal (sy, one)
            wide = Equal (sx, one)
            not_wide = Not (wide)
            both = And (narrow, not_wide)
            places = NonZero (both)
            axes = Reshape (places, all)
            sum = ReduceSum (x, axes)
            out = Exp (sum)
        }""",
        {"x": (4, 6, 8)},
    )
    (total,) = (node.outputs[0] for node in graph.nodes if node.op_type == "ReduceSum")
    assert graph.values[total].shape == (1, 6, 8)


def test_shapes_in_a_loop_over_data_of_unknown_shape():
    """Names of sizes hold in a body too, where ONNX Runtime has nothing else to tell them by."""
    text = """loop (float[n, 20] x, int64[2] first, int64[3] all) => (float[n, 4] last) {
        start = Reshape (x, first)
        steps = Reshape (x, all)
        last = Scan <num_scan_inputs = 1, body = body (float[n, 4] old, float[n, 4] step)
            => (float[n, 4] new) { product = Mul (old, step) new = Add (product, step) }>
            (start, steps)
    }"""
    body = load_model(text, {"x": (3, 20)}).nodes[-1].subgraphs["body"]
    assert body.values["product"].shape == (3, 4)


@pytest.mark.parametrize("branches", [
    """If (c) <
        then_branch = t () => (float16[8] a) { a = Mul (s, s) },
        else_branch = e () => (float16[8] b) { b = Tanh (s) }>""",
    """Scan <num_scan_inputs = 1, body = body (float16[8] row) => (float16[8] sum) {
        sum = Mul (row, s)
    }> (x)""",
])  # fmt: skip
def test_float16_values_that_a_body_reads_from_outside(branches):
    """ONNX Runtime casts them outside and inside, under one name."""
    text = f"""g (float16[n, 8] x, float16[8] v, bool c) => (float16[n, 8] y) {{
        s = Sigmoid (v)
        m = Mul (x, s)
        z = {branches}
        y = Add (m, z)
    }}"""
    graph = load_model(text, {"x": (3, 8)})
    bodies = [body for node in graph.nodes for body in node.subgraphs.values()]
    inner = {name for body in bodies for name in body.values}
    assert inner
    assert not graph.values.keys() & inner


def declared(shape: str, given: tuple[int, ...]) -> RuntimeGraph:
    text = f"g (float[{shape}] x) => (float[{shape}] y) {{ y = Relu (x) }}"
    return load_model(text, {"x": given})


def test_a_size_of_zero():
    assert declared("N, 0", (4, 0)).values["x"].shape == (4, 0)


@pytest.mark.parametrize(
    ("shape", "given", "known"),
    [("N, C", (4,), "[4, 'C']"), ("N, C", (4, 3, 2), "[4, 3]"), ("N, 0", (4, 3), "[4, 0]")],
)
def test_a_shape_that_the_model_does_not_declare(shape, given, known):
    with refused("input-shape", re.escape(known)):
        declared(shape, given)


def test_blocked_layout_has_a_block():
    assert nchwc_block() in (8, 16)


# Names of nodes and values in reports are those of the layers.


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("labels")
    build_package(zoo.cnn(), folder, loss="cross_entropy")
    return Package.open(folder)


def shapes(package: Package) -> dict[str, tuple[int, ...]]:
    return {
        spec.name: tuple(size if isinstance(size, int) else 4 for size in spec.shape)
        for spec in package.manifest.input_specs()
    }


def test_every_node_belongs_to_a_layer(package):
    """Whoever reads a weight is called after it, whatever the node's name is."""
    graph = load_runtime_graph(package.training_model, shapes(package))
    parameters = {p.name for p in package.manifest.parameters}
    labels = Labels(graph, parameters, later="grad/")
    layers = {name.rpartition(".")[0] for name in parameters}
    seen = set()
    for index, node in enumerate(graph.nodes):
        label = labels.node(index)
        layer, _, operator = label.removeprefix("grad/").rpartition("/")
        assert operator == node.op_type
        assert layer in layers
        read = [name for name in node.inputs if name in parameters]
        if read:
            assert layer == read[0].rpartition(".")[0]
        seen.add((label.startswith("grad/"), layer))
    assert seen == {(later, layer) for later in (False, True) for layer in layers}


def test_contract_names_stay(package):
    graph = load_runtime_graph(package.training_model, shapes(package))
    labels = Labels(graph, {p.name for p in package.manifest.parameters}, later="grad/")
    for name in (*graph.inputs, *graph.outputs):
        assert labels.value(name) == name


def test_reports_show_no_short_names(package):
    plan = plan_memory(package, shapes(package))
    for tensor in plan.tensors_at_peak():
        assert len(tensor.name) > 4
    for point in plan.timeline:
        assert point.node.endswith(point.op_type)


def test_without_parameters_the_operator_is_the_name():
    node = Node("a", "Mul", "", ("x", "x"), ("y",), {})
    values = {name: Value(name, 4, (1,), (1,)) for name in ("x", "y")}
    labels = Labels(RuntimeGraph(("x",), ("y",), (node,), values, {}))
    assert labels.node(0) == "Mul"
    assert labels.value("unknown") == "unknown"


def test_values_in_branches_have_the_layer_of_the_branch(tmp_path):
    inner = Node("b", "Neg", "", ("x",), ("z",), {})
    branch = RuntimeGraph((), ("z",), (inner,), {}, {})
    outer = Node("a", "If", "", ("c",), ("y",), {}, {"then_branch": branch}, ("fc.weight",))
    graph = RuntimeGraph(("c", "fc.weight"), ("y",), (outer,), {}, {})
    labels = Labels(graph, {"fc.weight"}, later="grad/")
    assert labels.node(0) == "fc/If"
    assert labels.value("z") == "fc/Neg"


# The order of execution, held against what ONNX Runtime's profile says it did.


def executed(path: Path, folder: Path, batch: int, *, optimize: bool) -> tuple[list[str], Path]:
    """Names of the nodes in the order in which one run executed them, and the saved model."""
    opened = session(
        onnx.load(path), "all" if optimize else "off", enable_profiling=True,
        profile_file_prefix=str(folder / "profile"),
        optimized_model_filepath=str(folder / "saved.onnx"),
    )  # fmt: skip
    opened.run(None, zeros(opened, batch))
    return [each["name"] for each in kernels(opened)], folder / "saved.onnx"


def shuffled(path: Path, to: Path, seed: int) -> onnx.ModelProto:
    """A model with its nodes in another order that is also topological, named by position."""
    model = onnx.load(path)
    order = random.Random(seed)
    producers = {name: i for i, node in enumerate(model.graph.node) for name in node.output}
    waiting = {
        i: {producers[name] for name in reads(node) if name in producers}
        for i, node in enumerate(model.graph.node)
    }
    nodes = []
    while waiting:
        ready = [i for i, needs in waiting.items() if not needs & waiting.keys()]
        chosen = order.choice(ready)
        del waiting[chosen]
        nodes.append(onnx.NodeProto.FromString(model.graph.node[chosen].SerializeToString()))
    for index, node in enumerate(nodes):
        node.name = f"node {index}"
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, to)
    return model


def reads(node: onnx.NodeProto) -> list[str]:
    inner = [n for a in node.attribute if a.HasField("g") for n in a.g.node]
    results = [v.name for a in node.attribute if a.HasField("g") for v in a.g.output]
    return [*node.input, *results, *(name for n in inner for name in reads(n))]


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize("seed", [0, 1])
def test_unoptimized(name, seed, case, tmp_path):
    package = case(name).package
    model = shuffled(package.training_model, tmp_path / "model.onnx", seed)
    ran, _ = executed(tmp_path / "model.onnx", tmp_path, case(name).batch_size, optimize=False)
    names = [f"node {index}" for index in execution_order(model.graph)]
    assert [name for name in ran if name in set(names)] == names


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_saved_optimized_model(name, case, tmp_path):
    package = case(name).package
    original = shuffled(package.training_model, tmp_path / "model.onnx", 5)
    ran, saved = executed(tmp_path / "model.onnx", tmp_path, case(name).batch_size, optimize=True)
    graph = onnx.load(saved).graph
    sort_saved_model(graph, original.graph)
    names = [node.name or node.op_type for node in graph.node]
    assert [name for name in ran if name in set(names)] == names


def test_model_that_was_not_changed_is_sorted():
    """A model without anything to optimize is saved in the order of its file."""
    nodes = [
        onnx.helper.make_node("Neg", ["x"], ["a"]), onnx.helper.make_node("Exp", ["a"], ["b"]),
        onnx.helper.make_node("Sqrt", ["a"], ["c"]), onnx.helper.make_node("Abs", ["x"], ["d"]),
        onnx.helper.make_node("Add", ["b", "c"], ["e"]),
    ]  # fmt: skip
    graph = onnx.helper.make_graph(nodes, "g", [], [])
    saved = onnx.GraphProto.FromString(graph.SerializeToString())
    sort_saved_model(saved, graph)
    # Add is the last that nobody reads; of its operands' producers Sqrt stands later.
    assert [node.op_type for node in saved.node] == ["Neg", "Sqrt", "Exp", "Add", "Abs"]


def test_values_of_bodies_that_are_called_like_outer_ones_are_renamed():
    """At every depth, wherever the name stands; what only a body has keeps its name."""
    graph = onnx.parser.parse_graph(
        """g (bool c, float[2] x) => (float[2] y) {
            a = Neg (x)
            y = If (c) <
                then_branch = t () => (float[2] a) <float[2] a> {
                    a = Exp (x)
                },
                else_branch = e () => (float[2] out) {
                    a = Sqrt (x)
                    own = Neg (a)
                    out = If (c) <
                        then_branch = tt () => (float[2] z) { own = Abs (a) z = Exp (own) },
                        else_branch = ee () => (float[2] z) { a = Abs (own) z = Exp (a) }
                    >
                }
            >
        }"""
    )
    rename_casts(graph)
    neg, branches = graph.node
    assert (list(neg.output), list(branches.output)) == (["a"], ["y"])
    then, other = (attribute.g for attribute in branches.attribute)
    assert then.node[0].output == ["a/inner"]
    assert [value.name for value in (*then.output, *then.value_info)] == ["a/inner"] * 2
    assert [list(node.output) for node in other.node] == [["a/inner"], ["own"], ["out"]]
    assert other.node[1].input == ["a/inner"]
    inner = [attribute.g.node for attribute in other.node[2].attribute]
    assert [(list(node.input), list(node.output)) for nodes in inner for node in nodes] == [
        (["a/inner"], ["own/inner"]), (["own/inner"], ["z"]), (["own"], ["a/inner/inner"]),
        (["a/inner/inner"], ["z"]),
    ]  # fmt: skip


def test_what_is_computed_in_float32_has_the_name_of_the_model_where_that_is_gone():
    graph = onnx.parser.parse_graph(
        """g (float16[2] x) => (float16[2] y) <float16[2] a, float[2] InsertedPrecisionFreeCast_a> {
            InsertedPrecisionFreeCast_x = Cast <to = 1> (x)
            InsertedPrecisionFreeCast_a = Exp (InsertedPrecisionFreeCast_x)
            InsertedPrecisionFreeCast_y = Log (InsertedPrecisionFreeCast_a)
            y = Cast <to = 10> (InsertedPrecisionFreeCast_y)
        }"""
    )
    rename_casts(graph)
    cast = "InsertedPrecisionFreeCast_"
    assert [list(node.output) for node in graph.node] == [[f"{cast}x"], ["a"], [f"{cast}y"], ["y"]]
    assert [list(node.input) for node in graph.node[1:3]] == [[f"{cast}x"], ["a"]]
    assert [(v.name, v.type.tensor_type.elem_type) for v in graph.value_info] == [("a", 1)]
