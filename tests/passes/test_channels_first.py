import numpy as np
import onnx_ir as ir
import pytest

from odtpack.passes.layout import keep_channels_first, small_convolutions
from odtpack.passes.patterns import pool_before_relu
from tests.passes.tools import assert_same, assert_unchanged, changed, op_types, parse, random_feeds

_SHAPES = (
    "int64[4] planes = {-1, 3, 2, 2}, int64[3] flat = {-1, 3, 4}, int64[3] column = {-1, 1, 1}, "
    "int64[2] space = {2, 3}, int64[1] samples = {0}, float six = {6.0}, float zero = {0.0}, "
    "float[3] zeros = {0.0, 0.0, 0.0}, float[3] ones = {1.0, 1.0, 1.0}"
)
_FIRST = "t{0} = Transpose <perm = [1, 0, 2]> ({0}) p{0} = Reshape (t{0}, planes)"
_BACK = "f{0} = Reshape ({0}, flat) {1} = Transpose <perm = [1, 0, 2]> (f{0})"


def _model(body: str, outputs: str = "float[3, N, 4] y") -> ir.Model:
    inputs = "float[3, N, 4] a, float[3, N, 4] b, float[3] w"
    start = f"{_FIRST.format('a')} {_FIRST.format('b')} v = Reshape (w, column)"
    return parse(f"g ({inputs}) => ({outputs}) <{_SHAPES}> {{ {start} {body} }}")


def _used(model: ir.Model) -> list[str]:
    """Operators on which the outputs depend."""
    found, stack = set(), [v.producer() for v in model.graph.outputs]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [v.producer() for v in node.inputs if v is not None]
    return sorted(node.op_type for node in found)


@pytest.mark.parametrize("body", [
    pytest.param("z = Clip (pa, zero, six)", id="activation"),
    pytest.param("z = Add (pa, pb)", id="sum"),
    pytest.param("r = Relu (pa) m = HardSigmoid (r) z = Mul (m, pb)", id="mask"),
    pytest.param("c = Sub (pa, v) z = Mul (c, six)", id="per channel"),
    pytest.param("z = BatchNormalization <epsilon = 0.0> (pa, w, w, zeros, ones)",
                 id="normalization"),
])  # fmt: skip
def test_what_lies_between_two_products_is_not_transposed(body):
    model = _model(f"{body} {_BACK.format('z', 'y')}")
    after = changed(keep_channels_first, model)
    assert "Transpose" not in _used(after)
    assert_same(model, after, random_feeds(model, N=5))


def test_sums_per_channel_take_channels_first():
    model = _model(
        f"z = Relu (pa) {_BACK.format('z', 'y')} s = ReduceSum <keepdims = 0> (z, space) "
        "c = ReduceSum <keepdims = 0> (s, samples) k = Size (z)",
        "float[3, N, 4] y, float[3] c, int64 k",
    )
    after = changed(keep_channels_first, model)
    assert "Transpose" not in _used(after)
    assert _used(after).count("ReduceSum") == 1
    assert_same(model, after, random_feeds(model, N=5))


def test_other_readers_share_one_transpose():
    model = _model(
        f"z = Relu (pa) {_BACK.format('z', 'y')} e = Exp (z) g = Exp (z)",
        "float[3, N, 4] y, float[N, 3, 2, 2] e, float[N, 3, 2, 2] g",
    )
    after = changed(keep_channels_first, model)
    assert _used(after).count("Transpose") == 1
    assert_same(model, after, random_feeds(model, N=5))


@pytest.mark.parametrize(("body", "outputs"), [
    pytest.param("y = Relu (pa)", "float[N, 3, 2, 2] y", id="read channels last only"),
    pytest.param("r = Relu (pa) y = Exp (r)", "float[N, 3, 2, 2] y", id="read by others"),
    pytest.param(f"e = Exp (pb) z = Add (pa, e) {_BACK.format('z', 'y')}", "float[3, N, 4] y",
                 id="another operand lies otherwise"),
])  # fmt: skip
def test_left_alone(body, outputs):
    assert_unchanged(keep_channels_first, _model(body, outputs))


def test_a_plane_of_another_shape_is_not_mixed_up():
    model = parse(
        "g (float[4, N, 3] a) => (float[3, N, 4] y) <int64[4] planes = {-1, 4, 3, 1}, "
        "int64[3] flat = {-1, 3, 4}> { t = Transpose <perm = [1, 0, 2]> (a) "
        "p = Reshape (t, planes) r = Relu (p) f = Reshape (r, flat) "
        "y = Transpose <perm = [1, 0, 2]> (f) }"
    )
    assert_unchanged(keep_channels_first, model)
    assert op_types(model.graph).count("Transpose") == 2


def _convolution(x: str, w: str, attributes: str = "", bias: str = "", out: str = "N, o, h, w"):
    inputs = f"float[{x}] x, float[{w}] w" + (f", float[{bias}] b" if bias else "")
    call = "(x, w, b)" if bias else "(x, w)"
    settings = f"<{attributes}>" if attributes else ""
    return parse(f"g ({inputs}) => (float[{out}] y) {{ y = Conv {settings} {call} }}")


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("x", "w", "attributes"), [
    pytest.param("N, 5, 3, 4", "6, 5, 1, 1", "", id="1x1"),
    pytest.param("N, 5, 9", "6, 5, 1", "", id="a line"),
    pytest.param("2, 5, 7, 7", "6, 5, 1, 1", "kernel_shape = [1, 1]", id="fixed batch"),
    pytest.param("N, 6, 5, 5", "6, 1, 3, 3", "group = 6", id="depthwise"),
    pytest.param("N, 6, 5, 4", "6, 1, 3, 3", "group = 6, pads = [1, 1, 1, 1]", id="padded"),
    pytest.param("N, 6, 8, 7", "6, 1, 3, 3", "group = 6, pads = [1, 0, 2, 1], strides = [2, 2]",
                 id="strides"),
    pytest.param("N, 6, 8, 8", "6, 1, 2, 3", "group = 6, dilations = [3, 2]", id="dilations"),
    pytest.param("N, 6, 8, 8", "6, 1, 3, 3", 'group = 6, auto_pad = "SAME_LOWER", strides = [3, 3]',
                 id="same"),
])  # fmt: skip
def test_rewritten(x, w, attributes, bias):
    out = ", ".join("Nohw"[: x.count(",") + 1])
    model = _convolution(x, w, attributes, "6" if bias else "", out)
    after = changed(small_convolutions, model)
    assert "Conv" not in op_types(after.graph)
    assert {"MatMul", "Gemm"} & set(op_types(after.graph))
    assert after.graph.outputs[0].name == "y"
    assert_same(model, after, random_feeds(model, N=3))


@pytest.mark.parametrize(("x", "w", "attributes"), [
    pytest.param("N, 5, 9, 9", "6, 5, 1, 1", "", id="many pixels"),
    pytest.param("N, 6, 40, 40", "6, 1, 3, 3", "group = 6", id="a large band"),
    pytest.param("N, 5, 3, 3", "6, 5, 3, 3", "pads = [1, 1, 1, 1]", id="a full kernel"),
    pytest.param("N, 6, 3, 3", "6, 3, 1, 1", "group = 2", id="groups"),
    pytest.param("N, 6, 3, 3", "12, 1, 3, 3", "group = 6", id="two features for a channel"),
    pytest.param("N, 5, 3, 3", "6, 5, 1, 1", "strides = [2, 2]", id="1x1 with strides"),
    pytest.param("N, 5, 3, 3", "6, 5, 1, 1", "pads = [1, 1, 1, 1]", id="1x1 with padding"),
    pytest.param("N, 5, k, 3", "6, 5, 1, 1", "", id="unknown size"),
])  # fmt: skip
def test_convolutions_left_alone(x, w, attributes):
    assert_unchanged(small_convolutions, _convolution(x, w, attributes))


@pytest.mark.parametrize(("given", "weight"), [
    pytest.param("", "Constant <value = float[1, 2, 1, 1] {1, 2}> ()", id="constant"),
    pytest.param(", float[1, 2, 1, 1] v", "Neg(v)", id="computed"),
])  # fmt: skip
def test_a_weight_that_is_not_stored(given, weight):
    model = parse(
        f"g (float[N, 2, 3, 3] x{given}) => (float[N, 1, 3, 3] y) {{ w = {weight} y = Conv(x, w) }}"
    )
    assert_unchanged(small_convolutions, model)


def test_the_batch_stays_free():
    model = _convolution("N, 5, 3, 4", "6, 5, 1, 1")
    after = changed(small_convolutions, model)
    for size in (1, 4):
        assert_same(model, after, random_feeds(model, N=size))
    assert not isinstance(after.graph.outputs[0].shape[0], int)
    assert np.prod(after.graph.outputs[0].shape[2:]) == 12


SHAPE = "float[N, 3, 9, 9]"


def _pooled(body: str, outputs: str = "float[N, 3, h, w] y", shape: str = SHAPE):
    return parse(f"g ({shape} x) => ({outputs}) {{ {body} }}", domains=["my"])


@pytest.mark.parametrize(("shape", "attributes"), [
    (SHAPE, "kernel_shape = [2, 2], strides = [2, 2]"),
    (SHAPE, "kernel_shape = [3, 3], pads = [1, 1, 1, 1]"),
    (SHAPE, "kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1"),
    (SHAPE, 'kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_UPPER"'),
    (SHAPE, "kernel_shape = [2, 2], dilations = [2, 3]"),
    ("float[N, 3, 9]", "kernel_shape = [3]"),
])  # fmt: skip
def test_swapped(shape, attributes):
    outputs = shape.replace("9", "h", 1).replace("9", "w") + " y"
    model = _pooled(f"r = Relu(x) y = MaxPool <{attributes}> (r)", outputs, shape)
    after = changed(pool_before_relu, model)
    assert op_types(after.graph) == ["MaxPool", "Relu"]
    pool, relu = after.graph
    assert relu.outputs[0].name == "y"
    assert pool.attributes.keys() >= {"kernel_shape"}
    assert_same(model, after, random_feeds(model, N=2))
    assert_same(model, after, {"x": -abs(random_feeds(model, N=2)["x"])})


def test_two_in_a_row():
    model = _pooled(
        "a = Relu(x) b = MaxPool <kernel_shape = [2, 2]> (a)"
        "c = Relu(b) y = MaxPool <kernel_shape = [2, 2]> (c)"
    )
    after = changed(pool_before_relu, model)
    orders = ["MaxPool", "Relu"] * 2, ["MaxPool", "MaxPool", "Relu", "Relu"]
    assert op_types(after.graph) in orders
    assert_same(model, after, random_feeds(model, N=2))


@pytest.mark.parametrize(("body", "outputs"), [
    pytest.param("r = Relu(x) y = AveragePool <kernel_shape = [2, 2]> (r)", "", id="another pool"),
    pytest.param("r = Tanh(x) y = MaxPool <kernel_shape = [2, 2]> (r)", "", id="another function"),
    pytest.param("r = my.Relu(x) y = MaxPool <kernel_shape = [2, 2]> (r)", "", id="another domain"),
    pytest.param("r = Relu(x) y = MaxPool <kernel_shape = [2, 2]> (r) z = Neg(r)",
                 f"float[N, 3, h, w] y, {SHAPE} z", id="read elsewhere"),
    pytest.param("r = Relu(x) y = MaxPool <kernel_shape = [2, 2]> (r)",
                 f"float[N, 3, h, w] y, {SHAPE} r", id="an output"),
    pytest.param("r = Relu(x) y, i = MaxPool <kernel_shape = [2, 2]> (r)",
                 "float[N, 3, h, w] y, int64[N, 3, h, w] i", id="indices"),
    pytest.param("y = MaxPool <kernel_shape = [2, 2]> (x)", "", id="no relu"),
])  # fmt: skip
def test_something_else(body, outputs):
    assert_unchanged(pool_before_relu, _pooled(body, *([outputs] if outputs else [])))
