"""What loading does to subgraphs: shapes of what loops carry, parameters, conditions."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from odtpack.autodiff.expand import expand
from odtpack.graph import inference
from odtpack.graph.graphs import dims_of
from odtpack.model.loading import load_model

Dims = tuple[int | str | None, ...]


def known(value: ir.Value) -> Dims | None:
    """Dimensions without names that inference made up."""
    dims = dims_of(value)
    if dims is None:
        return None
    return tuple(None if isinstance(d, str) and d.startswith("unk__") else d for d in dims)


def load(text: str, opset: int = 17) -> ir.Model:
    return load_model(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')
    )


def the(model: ir.Model, op_type: str) -> ir.Node:
    (node,) = (node for node in model.graph.all_nodes() if node.op_type == op_type)
    return node


@pytest.mark.parametrize(
    ("step", "before", "varies"),
    [
        ("t = MatMul(s, w)", ("batch", 3), False),
        ("t = Concat <axis = 0> (s, s)", (None, 3), False),
        ("t = Concat <axis = 1> (s, s)", ("batch", None), True),
        ("flat = Flatten <axis = 0> (s) axes = Constant <value = int64[1] {0}> () "
         "t = Unsqueeze(flat, axes)", None, True),
        ("t = Identity(h)", ("batch", 3), False),
    ],
)  # fmt: skip
def test_carried_shapes_hold_unless_the_body_contradicts(
    step: str, before: Dims | None, varies: bool
) -> None:
    model = load(f"""net (int64 m, float[batch, 3] h, float[3, 3] w) => (int64 size) {{
      y = Loop <body = turn (int64 i, bool go, float[] s) => (bool on, float[] t) {{
        on = Identity(go) {step} }}> (m, , h)
      size = Size(y) }}""")
    loop = the(model, "Loop")
    state = loop.attributes["body"].as_graph().inputs[2]
    assert known(state) == before
    assert known(loop.outputs[0]) == before
    assert bool(state.meta.get(inference.VARIES)) == varies


def test_carried_shapes_of_a_loop_in_a_loop() -> None:
    model = load("""net (int64 m, float[2, 3] h, float[3, 3] w) => (int64 size) {
      y = Loop <body = outer (int64 i, bool go, float[] s) => (bool on, float[] t) {
        on = Identity(go)
        t = Loop <body = inner (int64 j, bool ok, float[] a) => (bool yes, float[] b) {
          yes = Identity(ok) b = MatMul(a, w) }> (m, , s) }> (m, , h)
      size = Size(y) }""")
    loops = [node for node in model.graph.all_nodes() if node.op_type == "Loop"]
    assert [dims_of(node.outputs[0]) for node in loops] == [(2, 3), (2, 3)]


def test_vectors_of_floats_move_to_the_main_graph_and_others_stay() -> None:
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


def test_bodies_see_the_axes_that_stand_around_them() -> None:
    model = load("""net (float[4, 3] x, float[3] h) => (float[4, 1, k] y) {
      axes = Constant <value = int64[1] {0}> ()
      last, y = Scan <num_scan_inputs = 1, body = turn (float[3] s, float[3] part)
          => (float[3] t, float[] o) { t = Mul(s, part) o = Unsqueeze(t, axes) }> (h, x) }""")
    body = the(model, "Scan").attributes["body"].as_graph()
    assert dims_of(body.outputs[1]) is None
    expand(model, ["h"])
    assert dims_of(body.outputs[1]) == (1, 3)
    assert dims_of(model.graph.outputs[0]) == (4, 1, 3)


def test_an_absent_condition_is_written_where_nothing_is_carried() -> None:
    model = load("""net (int64 m, float[3] w) => (float[n, 3] y) {
      y = Loop <body = turn (int64 i, bool go) => (bool on, float[3] part) {
        on = Identity(go) part = Neg(w) }> (m, "") }""")
    condition = the(model, "Loop").inputs[1]
    assert condition is not None
    assert condition.const_value is not None
    assert condition.const_value.numpy().item() is True
