"""Which nodes become a function: updates, and nothing whose inputs would live longer for it."""

import numpy as np
import onnx.reference
import onnx_ir as ir
import pytest

from odtpack.passes.aliases import UnsafeAliasError
from odtpack.passes.native import wrap
from odtpack_runtime.session.native import DOMAIN
from tests.passes.tools import check, op_types, parse

MOMENTUM = """momentum (float[n] p, float[n] g, float[n] b, float[1] rate)
    => (float[n] "p.out", float[n] "b.out") <float keep = {0.9}> {
    kept = Mul(b, keep) "b.out" = Add(kept, g) step = Mul("b.out", rate) "p.out" = Sub(p, step)
}"""


def computes_the_same(model: ir.Model, plain: ir.Model, feeds: dict[str, np.ndarray]) -> None:
    both = [
        onnx.reference.ReferenceEvaluator(ir.to_proto(each)).run(None, feeds)
        for each in (check(plain), model)
    ]
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_update_is_one_function_whose_body_is_its_nodes():
    plain = parse(MOMENTUM)
    model = wrap(plain)
    assert op_types(model.graph) == ["Kernel0"]
    assert op_types(plain.graph) == ["Mul", "Add", "Mul", "Sub"]
    (body,) = model.functions.values()
    assert [node.op_type for node in body] == op_types(plain.graph)
    feeds = {name: np.arange(4, dtype=np.float32) for name in "pgb"} | {"rate": np.float32([0.5])}
    computes_the_same(model, plain, feeds)


@pytest.mark.parametrize(("text", "left"), [
    # A chain in the middle of a model: its inputs would live to its end.
    ("m (float[n] x) => (float[n] y) { a = Mul(x, x) b = Sqrt(a) c = Add(b, x) y = Softmax(c) }",
     ["Mul", "Sqrt", "Add", "Softmax"]),
    # Too small to be worth a call, of a type without kernels, one node.
    ('m (float[8] x) => (float[8] y) { a = Mul(x, x) y = Sqrt(a) }', ["Mul", "Sqrt"]),
    ("m (double[n] x) => (double[n] y) { a = Mul(x, x) y = Sqrt(a) }", ["Mul", "Sqrt"]),
    ('m (float[n] x) => (float[n] y) { y = Sqrt(x) }', ["Sqrt"]),
    # What is read besides stays outside, with all before it.
    ("m (float[n] x) => (float[n] y, float z) { a = Mul(x, x) b = Abs(a) z = ReduceSum"
         "<keepdims = 0>(b) c = Neg(b) y = Sqrt(c) }", ["Mul", "Abs", "ReduceSum", "Kernel0"]),
])  # fmt: skip
def test_what_stays_as_it_is(text, left):
    model = wrap(parse(text))
    assert op_types(model.graph) == left
    assert len(model.functions) == left.count("Kernel0")


@pytest.mark.parametrize(("a", "b", "attributes", "native"), [
    ("[200, 40]", "[200, 16]", "transA = 1", True),
    ("[n, 40]", "[200, 16]", "transA = 1", False),  # a batch
    ("[64, 40]", "[64, 16]", "transA = 1", False),  # few rows
    ("[200, 8]", "[200, 16]", "transA = 1", False),
    ("[200, 40]", "[16, 200]", "transA = 1, transB = 1", False),
    ("[200, 40]", "[200, 16]", "transA = 1, alpha = 0.5", False),
    ("[40, 200]", "[200, 16]", "transA = 0", False),
])  # fmt: skip
def test_products_whose_first_operand_is_transposed(a, b, attributes, native):
    text = f"m (float{a} a, float{b} b) => (float[k, m] y) {{ y = Gemm<{attributes}>(a, b) }}"
    assert op_types(wrap(parse(text)).graph) == ["Kernel0" if native else "Gemm"]


def test_equal_bodies_are_one_function_whatever_their_scalars():
    text = """two (float[n] p, float[n] q, float[1] r, float[1] s) => (float[n] y, float[n] z) {
        a = Mul(p, r) y = Sub(a, r) b = Mul(q, s) z = Sub(b, s) }"""
    model = wrap(parse(text))
    assert op_types(model.graph) == ["Kernel0", "Kernel0"]
    assert (len(model.functions), model.graph.opset_imports[DOMAIN]) == (1, 1)


def test_an_alias_that_does_not_hold_is_refused():
    """The output would be written over the parameter before the last reader has run."""
    text = MOMENTUM.replace("=> (", "=> (float[n] late, ").replace("kept =", "late = Neg(p) kept =")
    with pytest.raises(UnsafeAliasError, match="after"):
        wrap(parse(text))


def test_a_constant_that_only_a_body_reads_is_left_to_it():
    """ONNX Runtime warns of an initializer that nothing reads, at each session."""
    text = """m (float[64, 128] x) => (float[64, 128] y) <int64[1] axes = {1}> {
        m = ReduceMax<axes = [1]>(x) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, axes) y = Div(e, s)
    }"""
    model = wrap(parse(text))
    assert "Kernel0" in op_types(model.graph)
    assert all(value.uses() for value in model.graph.initializers.values())


def statistics(x: str) -> str:
    """Nodes of a batch normalization in training mode, but for the last one."""
    return f"""
        "{x}.rows" = ReduceSum<keepdims = 0>({x}, space)
        "{x}.sum" = ReduceSum<keepdims = 0>("{x}.rows", samples)
        "{x}.mean" = Div("{x}.sum", count) "{x}.means" = Reshape("{x}.mean", each)
        "{x}.centered" = Sub({x}, "{x}.means")
        "{x}.square" = Mul("{x}.centered", "{x}.centered")
        "{x}.square.rows" = ReduceSum<keepdims = 0>("{x}.square", space)
        "{x}.squares" = ReduceSum<keepdims = 0>("{x}.square.rows", samples)
        "{x}.variance" = Div("{x}.squares", count)"""


@pytest.mark.parametrize(("scale", "native"), [("Exp(bias)", 2), ('Exp("q.mean")', 1)])
def test_of_normalizations_that_scale_by_each_other_s_means_one_stays(scale, native):
    """Their nodes have an order; two functions, each of which waits for the other, have none."""
    last = """BatchNormalization("{0}.centered", "{0}.scale", bias, zeros, "{0}.variance")"""
    plain = parse(
        f"""m (float[2, 3, 4, 4] p, float[2, 3, 4, 4] q, float[3] bias, float[3] zeros, float count)
            => (float[2, 3, 4, 4] y, float[2, 3, 4, 4] z)
            <int64[1] samples = {{0}}, int64[2] space = {{2, 3}}, int64[3] each = {{-1, 1, 1}}> {{
            {statistics("p")} "q.scale" = Exp("p.mean") {statistics("q")} "p.scale" = {scale}
            y = {last.format("p")} z = {last.format("q")} }}"""
    )
    model = wrap(plain)
    assert op_types(model.graph).count("Kernel0") == native
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((2, 3, 4, 4)).astype(np.float32) for name in "pq"}
    feeds |= {"bias": np.ones(3, np.float32), "zeros": np.zeros(3, np.float32)}
    computes_the_same(model, plain, feeds | {"count": np.float32(32)})


def test_rows_that_read_what_a_normalization_centered_do_not_wait_for_themselves():
    """What was wrapped before may stand behind what reads it: then it runs before that."""
    model = wrap(parse(
        f"""m (float[2, 3, 4, 32] p, float[2, 3, 4, 32] w, float[3] bias, float[3] zeros,
            float count) => (float[2, 3, 4, 32] y, float[2, 3, 4, 32] z)
            <int64[1] samples = {{0}}, int64[2] space = {{2, 3}}, int64[3] all = {{0, 2, 3}},
             int64[3] each = {{-1, 1, 1}}> {{
            {statistics("p")} a = Exp(w) m = Neg("p.centered") r = Mul(m, a)
            scale = ReduceSum<keepdims = 0>(a, all)
            y = BatchNormalization("p.centered", scale, bias, zeros, "p.variance")
            z = Softmax(r) }}"""
    ))  # fmt: skip
    assert op_types(model.graph) == ["Exp", "ReduceSum", "Kernel0", "Neg", "Mul", "Softmax"]
