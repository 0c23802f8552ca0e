"""What was found of one node is taken for another only if nothing tells them apart."""

import itertools
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from odtpack.autodiff.expand import expand
from odtpack.graph import inference
from odtpack.graph.fold import merge_equal
from odtpack.graph.graphs import dims_of
from odtpack.graph.inference import Found, NodeInference
from odtpack.model.loading import load_model
from tests.model_text import parsed

Make = Callable[[], tuple[int, ir.Node]]
Dims = tuple[int | str | None, ...]


def value(*dims: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.val("x", dtype, dims)


def constant(*numbers: int) -> ir.Value:
    found = ir.val("c", const_value=ir.tensor(np.array(numbers, np.int64)))
    ir.Graph([], [], nodes=[], initializers=[found])
    return found


def node(op_type, *inputs, outputs=1, domain="", opset=17, **attributes):
    return opset, ir.node(op_type, inputs, attributes, domain=domain, num_outputs=outputs)


# Each row: nodes that differ in one respect, and infer differently.
DIFFERENT: dict[str, list[Make]] = {
    "sizes": [lambda: node("Relu", value(2, 3)), lambda: node("Relu", value(3, 2))],
    "names of sizes": [lambda: node("Relu", value("a")), lambda: node("Relu", value("b"))],
    "type": [lambda: node("Relu", value(2)),
             lambda: node("Relu", value(2, dtype=ir.DataType.DOUBLE))],
    "operator": [lambda: node("Shape", value(2, 3)), lambda: node("Size", value(2, 3))],
    "domain": [lambda: node("Relu", value(2)), lambda: node("Relu", value(2), domain="my")],
    "opset": [lambda: node("ReduceMean", value(2, 3), constant(1), opset=18),
              lambda: node("ReduceMean", value(2, 3), constant(1), opset=17)],
    "attribute": [lambda: node("Concat", value(2, 3), value(2, 3), axis=0),
                  lambda: node("Concat", value(2, 3), value(2, 3), axis=1)],
    "type of an attribute": [lambda: node("Concat", value(2, 3), value(2, 3), axis=1),
                             lambda: node("Concat", value(2, 3), value(2, 3), axis=1.0)],
    "constant": [lambda: node("Reshape", value(2, 3), constant(3, 2)),
                 lambda: node("Reshape", value(2, 3), constant(6, 1))],
    "constant or not": [lambda: node("Reshape", value(2, 3), constant(3, 2)),
                        lambda: node("Reshape", value(2, 3), value(2, dtype=ir.DataType.INT64))],
    "number of outputs": [lambda: node("Split", value(6), outputs=2),
                          lambda: node("Split", value(6), outputs=3)],
    "place of an input": [
        lambda: node("Slice", value(4), constant(0), constant(4), constant(0), constant(2)),
        lambda: node("Slice", value(4), constant(0), constant(4), None, constant(2)),
        lambda: node("Slice", value(4), constant(0), constant(3), constant(0))],
}  # fmt: skip


def infer(make: Make) -> list[Found | None]:
    opset, given = make()
    return NodeInference({"": opset, "my": 1}).outputs(given)


@pytest.mark.parametrize("respect", DIFFERENT)
def test_nodes_that_differ_do_not_share_what_was_found(respect, monkeypatch):
    alone = []
    for make in DIFFERENT[respect]:
        monkeypatch.setattr(inference, "_KNOWN", {})
        alone.append(infer(make))
    if respect != "place of an input":
        assert alone[0] != alone[1]
    for order in itertools.permutations(range(len(alone))):
        monkeypatch.setattr(inference, "_KNOWN", {})
        for index in order:
            assert infer(DIFFERENT[respect][index]) == alone[index]


def test_the_same_node_is_inferred_once(monkeypatch):
    known: dict[object, object] = {}
    monkeypatch.setattr(inference, "_KNOWN", known)
    for _ in range(3):
        assert infer(DIFFERENT["sizes"][0]) == [(ir.DataType.FLOAT, (2, 3))]
    assert len(known) == 1


@pytest.mark.parametrize(("before", "after", "found"), [
    (("n", 5, 2, 4), ("n", 5, None), ("n", 5, 8)),
    (("n", 5, 8), ("n", None, 2, 4), ("n", 5, 2, 4)),
    (("n", 6), (None, 2, 3), ("n", 2, 3)),
    (("n", 6), (None, 3), (None, 3)),  # 2 n
    (("n", "t", 6), (None, 6), (None, 6)),  # n t
    (("n", 6), (None, 4), (None, 4)),  # n must be even
    (("n", 6), ("n", None, None), ("n", None, None)),
    (("n", 0), ("n", None, 0), ("n", None, 0)),  # any
    ((None, 6), (None, None), (None, None)),
])  # fmt: skip
def test_a_reshape_keeps_the_number_of_elements(before, after, found):
    x, sizes = ir.val("x", ir.DataType.FLOAT, before), ir.val("s", ir.DataType.INT64, [len(after)])
    reshape = ir.node("Reshape", [x, sizes])
    y = reshape.outputs[0]
    y.name, y.shape, y.type = "y", ir.Shape(after), x.type
    graph = ir.Graph([x, sizes], [y], nodes=[reshape], opset_imports={"": 17})
    inference.infer_shapes(ir.Model(graph, ir_version=8))
    assert known(y) == found


def test_what_is_repeated_once_keeps_its_size():
    """What reads it has the size, too, that it had no name for before."""
    text = """g (float[n, 2, t] x) => (float[a, b, c] z) <int64[3] times = {1, 3, 2}> {
        y = Tile(x, times) z = Relu(y)
    }"""
    tile, relu = load(text).graph
    assert known(tile.outputs[0]) == ("n", 6, None)
    assert (known(relu.outputs[0]) or ())[:2] == ("n", 6)


# Nodes that compute the same are merged, and only these.


def merged(body: str, outputs: str = "float[3] y") -> list[str]:
    """The operators that are left of the nodes of a graph."""
    graph = ir.from_proto(parsed(f"g (float[3] x) => ({outputs}) {{ {body} }}", 18)).graph
    merge_equal(graph)
    onnx.checker.check_model(ir.to_proto(ir.Model(graph, ir_version=9)))
    return [node.op_type for node in graph]


def test_equal_nodes_become_one_and_then_their_readers_do():
    body = "a = Neg(x) b = Neg(x) c = Exp(a) d = Exp(b) y = Add(c, d)"
    assert merged(body) == ["Neg", "Exp", "Add"]


def test_outputs_keep_nodes_of_their_own():
    assert merged("y = Neg(x) z = Neg(x)", "float[3] y, float[3] z") == ["Neg", "Neg"]


@pytest.mark.parametrize(("left", "right"), [
    ("Softmax<axis = 0>(x)", "Softmax<axis = -1>(x)"),
    ("Neg(x)", "Abs(x)"),
    ("Bernoulli(x)", "Bernoulli(x)"),
    ("Dropout(x)", "Dropout(x)"),
    ("RandomNormalLike(x)", "RandomNormalLike(x)"),
])  # fmt: skip
def test_others_stay_as_they_are(left, right):
    assert len(merged(f"a = {left} b = {right} y = Add(a, b)")) == 3


def test_an_output_that_only_one_of_them_has_is_computed():
    body = "a = MaxPool<kernel_shape = [1]>(i) b, at = MaxPool<kernel_shape = [1]>(i)"
    body = f"i = Unsqueeze(x, n) {body} f = Cast<to = 1>(at) c = Add(a, b) y = Add(c, f)"
    body = f"n = Constant<value = int64[2] {{0, 1}}>() {body}"
    assert merged(body, "float[1, 1, 3] y").count("MaxPool") == 2


# What loading does to subgraphs: shapes of what loops carry, parameters, conditions.


def known(value: ir.Value) -> Dims | None:
    """Dimensions without names that inference made up."""
    dims = dims_of(value)
    if dims is None:
        return None
    return tuple(None if isinstance(d, str) and d.startswith("unk__") else d for d in dims)


def load(text: str) -> ir.Model:
    return load_model(parsed(text))


def the(model: ir.Model, op_type: str) -> ir.Node:
    (node,) = (node for node in model.graph.all_nodes() if node.op_type == op_type)
    return node


@pytest.mark.parametrize(("step", "before", "varies"), [
    ("t = MatMul(s, w)", ("batch", 3), False),
    ("t = Concat <axis = 0> (s, s)", (None, 3), False),
    ("t = Concat <axis = 1> (s, s)", ("batch", None), True),
    ("flat = Flatten <axis = 0> (s) axes = Constant <value = int64[1] {0}> () "
         "t = Unsqueeze(flat, axes)", None, True),
    ("t = Identity(h)", ("batch", 3), False),
])  # fmt: skip
def test_carried_shapes_hold_unless_the_body_contradicts(step, before, varies):
    model = load(f"""net (int64 m, float[batch, 3] h, float[3, 3] w) => (int64 size) {{
      y = Loop <body = turn (int64 i, bool go, float[] s) => (bool on, float[] t) {{
        on = Identity(go) {step} }}> (m, , h)
      size = Size(y) }}""")
    loop = the(model, "Loop")
    state = loop.attributes["body"].as_graph().inputs[2]
    assert known(state) == before
    assert known(loop.outputs[0]) == before
    assert bool(state.meta.get(inference.VARIES)) == varies


def test_carried_shapes_of_a_loop_in_a_loop():
    model = load("""net (int64 m, float[2, 3] h, float[3, 3] w) => (int64 size) {
      y = Loop <body = outer (int64 i, bool go, float[] s) => (bool on, float[] t) {
        on = Identity(go)
        t = Loop <body = inner (int64 j, bool ok, float[] a) => (bool yes, float[] b) {
          yes = Identity(ok) b = MatMul(a, w) }> (m, , s) }> (m, , h)
      size = Size(y) }""")
    loops = [node for node in model.graph.all_nodes() if node.op_type == "Loop"]
    assert [dims_of(node.outputs[0]) for node in loops] == [(2, 3), (2, 3)]


def test_vectors_of_floats_move_to_the_main_graph_and_others_stay():
    branch = """b = Constant <value = float[3] {1.0, 2.0, 3.0}> ()
      one = Constant <value = float {1.0}> () axes = Constant <value = int64[1] {0}> ()"""
    model = load(f"""net (bool c, float[2, 3] x) => (float[n, 2, 3] y) {{
      b = Neg(x)
      y = If (c) <
        then_branch = yes () => (float[1, 2, 3] y1) {{
          {branch.replace("b =", "v =")} u = Add(x, v) k = Mul(u, one) y1 = Unsqueeze(k, axes) }},
        else_branch = no () => (float[1, 2, 3] y2) {{
          {branch.replace("b =", "v =").replace("1.0, 2.0", "4.0, 5.0")} u = Add(b, v)
          k = Mul(u, one) y2 = Unsqueeze(k, axes) }}>
    }}""")
    assert list(model.graph.initializers) == ["v", "v_2"]
    branches = [graph.as_graph() for graph in the(model, "If").attributes.values()]
    assert [len(branch.initializers) for branch in branches] == [2, 2]
    assert [dims_of(branch.outputs[0]) for branch in branches] == [(1, 2, 3)] * 2


def test_bodies_see_the_axes_that_stand_around_them():
    model = load("""net (float[4, 3] x, float[3] h) => (float[4, 1, k] y) {
      axes = Constant <value = int64[1] {0}> ()
      last, y = Scan <num_scan_inputs = 1, body = turn (float[3] s, float[3] part)
          => (float[3] t, float[] o) { t = Mul(s, part) o = Unsqueeze(t, axes) }> (h, x) }""")
    body = the(model, "Scan").attributes["body"].as_graph()
    assert dims_of(body.outputs[1]) is None
    expand(model, ["h"])
    assert dims_of(body.outputs[1]) == (1, 3)
    assert dims_of(model.graph.outputs[0]) == (4, 1, 3)


def test_an_absent_condition_is_written_where_nothing_is_carried():
    model = load("""net (int64 m, float[3] w) => (float[n, 3] y) {
      y = Loop <body = turn (int64 i, bool go) => (bool on, float[3] part) {
        on = Identity(go) part = Neg(w) }> (m, "") }""")
    assert the(model, "Loop").inputs[1].const_value.numpy().item() is True
