"""What may be written into the memory of an input, and what may not."""

import onnx_ir as ir
import pytest

from odtpack.passes.aliases import UnsafeAliasError, verify
from tests.passes.tools import parse

HEAD = "g (float[4] source, float[4] g, float[4, 4] w, bool c) => ({outputs}) {{ {body} }}"


def _verify(body: str, outputs: str = "float[4] out") -> None:
    graph = parse(HEAD.format(outputs=outputs, body=body)).graph
    source = next(value for value in graph.inputs if value.name == "source")
    verify(graph, source, next(value for value in graph.outputs if value.name == "out"))


IF = """
out = If (c) <
    then_branch = fresh () => (float[4] t) {{ {then} }},
    else_branch = added () => (float[4] e) {{ {otherwise} }}
>
"""


@pytest.mark.parametrize("body", [
    pytest.param("out = Add(source, g)", id="sum"),
    pytest.param("out = Add(g, source)", id="sum the other way"),
    pytest.param("out = Mul(source, source)", id="square"),
    pytest.param("out = Identity(source)", id="copy"),
    pytest.param("out = Where(c, g, source)", id="choice"),
    pytest.param("out = Neg(g)", id="not read at all"),
    pytest.param("t = MatMul(w, source) out = Neg(t)", id="read before, by any operator"),
    pytest.param("t = MatMul(w, source) out = Sub(source, t)", id="read before and in place"),
    pytest.param(IF.format(then="t = Identity(g)", otherwise="e = Add(source, g)"), id="branches"),
    pytest.param(
        IF.format(then="t = MatMul(w, g)", otherwise="p = MatMul(w, g) e = Add(source, p)"),
        id="product in the branches"),
    pytest.param(IF.format(then="t = Neg(g)", otherwise="p = Mul(source, g) e = Sub(p, g)"),
                 id="read earlier in the branch"),
    pytest.param("u = Neg(source) z = Constant <value = int64[1] {0}> () s = Size(u) n = Mul(s, z) "
                 "v = Reshape(source, n) t = Mul(v, g) out = Add(t, g)", id="a view read before"),
    pytest.param("i = Constant <value = int64[2] {1, 1}> () out = ScatterElements(source, i, g)",
                 id="values put at places"),
    pytest.param(
            IF.format(then="t = Neg(g)", otherwise="e = ScatterElements(source, i, u)").join(
                ["i = Constant <value = int64[2] {1, 1}> () u = Relu(g)", ""]
            ),
            id="values put at places in the branch",
        ),
])  # fmt: skip
def test_safe(body):
    _verify(body)


BOTH = "float[4] out, float[4] other"


@pytest.mark.parametrize(("body", "outputs", "reason"), [
    pytest.param("out = Add(source, g) other = Neg(source)", BOTH, "may read 'source' after",
                 id="another reader"),
    pytest.param("out = Add(source, g) other = Mul(source, out)", BOTH, "may read 'source' after",
                 id="a later reader"),
    pytest.param("t = Neg(g) out = Add(source, t) u = Mul(source, t) other = Neg(u)", BOTH,
                 "may read 'source' after", id="side by side"),
    pytest.param("out = MatMul(w, source)", "float[4] out", "MatMul does not write 'out' in place",
                 id="every element is read for each"),
    pytest.param("out = Softmax(source)", "float[4] out", "Softmax does not",
                 id="rows are read twice"),
    pytest.param("out = Add(source, w)", "float[4, 4] out", "differ in shape", id="broadcast"),
    pytest.param("t = Mul(source, w) out = ReduceSum <keepdims = 0> (t)", "float out",
                 "differ in shape", id="another shape"),
    pytest.param(
        IF.format(then="t = Identity(g)", otherwise="e = Add(source, g)") + "other = Neg(source)",
        BOTH, "may read 'source' after", id="read outside the branches"),
    pytest.param(IF.format(then="t = Identity(g)", otherwise="e = MatMul(w, source)"),
                 "float[4] out", "MatMul does not", id="a product with it in the branch"),
    pytest.param("n = Shape(g) v = Reshape(source, n) out = Add(source, g) other = Neg(v)", BOTH,
                 "may read 'source' after", id="a view read later"),
    pytest.param(
        "u = Neg(source) n = Shape(u) v = Reshape(source, n) t = Mul(v, g) out = Add(t, g)",
        "float[4] out", "may read 'source' after",
        id="read before by an edge that ONNX Runtime folds"),
    pytest.param("n = Shape(g) v = Reshape(source, n) out = Softmax(v)", "float[4] out",
                 "Softmax does not", id="a view read out of place"),
    pytest.param(
        "i = Constant <value = int64[4] {3, 2, 1, 0}> () out = ScatterElements(g, i, source)",
        "float[4] out", "ScatterElements does not",
        id="put at other places than they are read from"),
    pytest.param(
        "i = Constant <value = int64[4] {3, 2, 1, 0}> () n = Shape(g) v = Reshape(source, n)"
        "out = ScatterElements(source, i, v)", "float[4] out", "ScatterElements does not",
        id="put over a view of themselves"),
    pytest.param(
        "i = Constant <value = int64[4] {3, 2, 1, 0}> () out = ScatterElements(source, i, g)"
        "other = Neg(source)", BOTH, "may read 'source' after",
        id="read after values were put into it"),
    pytest.param("out, other = If (c) <"
                 "then_branch = a () => (float[4] t, float[4] t2) { t = Neg(g) t2 = Neg(t) },"
                 "else_branch = b () => (float[4] e, float[4] e2)"
                 "{ e = Add(source, g) e2 = Mul(source, e) } >", BOTH, "may read 'source' after",
                 id="read later in the branch"),
])  # fmt: skip
def test_unsafe(body, outputs, reason):
    with pytest.raises(UnsafeAliasError, match=reason):
        _verify(body, outputs)


def test_a_product_is_added_in_place_but_not_made_of_what_it_overwrites():
    """A Gemm copies its third input into the output before it reads the others."""
    head = "g (float[1, 4] source, float[1, 1] k, float[1, 4] b) => (float[1, 4] out) {{ {} }}"
    for body, safe in (
        ("out = Gemm(k, b, source)", True),
        ("t = Mul(source, b) out = Gemm <beta = 0.5> (k, t, source)", True),
        ("out = Gemm(k, source, b)", False),
        ("out = Gemm(k, source, source)", False),
        ("out = Gemm(source, w, source)", False),
    ):
        text = head.format(body).replace("float[1, 4] b)", "float[1, 4] b, float[4, 4] w)")
        graph = parse(text).graph
        if safe:
            verify(graph, graph.inputs[0], graph.outputs[0])
        else:
            with pytest.raises(UnsafeAliasError, match="does not write 'out' in place"):
                verify(graph, graph.inputs[0], graph.outputs[0])


def test_a_subgraph_of_unknown_owner():
    graph = parse(HEAD.format(outputs="float[4] out", body="out = Add(source, g)")).graph
    source = graph.inputs[0]
    detached = ir.Graph([], [], nodes=[ir.node("Neg", [source])])
    with pytest.raises(UnsafeAliasError, match="unknown owner"):
        verify(graph, source, graph.outputs[0])
    assert len(detached) == 1


def test_a_clone_is_verified_by_its_own_nodes():
    body = IF.format(then="t = Identity(g)", otherwise="e = Add(source, g)")
    model = parse(HEAD.format(outputs="float[4] out", body=body))
    for each in (model, model.clone(), model.clone()):
        verify(each.graph, each.graph.inputs[0], each.graph.outputs[0])


def test_an_input_is_not_computed():
    graph = parse("g (float[4] source, float[4] g) => (float[4] y) { y = Add(source, g) }").graph
    with pytest.raises(UnsafeAliasError, match="not computed"):
        verify(graph, graph.inputs[0], graph.inputs[1])


def test_unknown_shapes_prove_nothing():
    graph = parse("g (float[4] source, float[4] g) => (float[4] y) { y = Add(source, g) }").graph
    graph.inputs[0].shape = graph.outputs[0].shape = None
    with pytest.raises(UnsafeAliasError, match="unknown"):
        verify(graph, graph.inputs[0], graph.outputs[0])


def test_equal_symbols_are_equal_sizes():
    graph = parse("g (float[n] source, float[n] g) => (float[n] y) { y = Add(source, g) }").graph
    assert isinstance(graph.inputs[0].shape[0], ir.SymbolicDim)
    verify(graph, graph.inputs[0], graph.outputs[0])
