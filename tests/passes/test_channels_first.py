from __future__ import annotations

import onnx_ir as ir
import pytest

from odtpack.passes.layout import keep_channels_first
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


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("z = Clip (pa, zero, six)", id="activation"),
        pytest.param("z = Add (pa, pb)", id="sum"),
        pytest.param("r = Relu (pa) m = HardSigmoid (r) z = Mul (m, pb)", id="mask"),
        pytest.param("c = Sub (pa, v) z = Mul (c, six)", id="per channel"),
        pytest.param(
            "z = BatchNormalization <epsilon = 0.0> (pa, w, w, zeros, ones)", id="normalization"
        ),
    ],
)
def test_what_lies_between_two_products_is_not_transposed(body: str) -> None:
    model = _model(f"{body} {_BACK.format('z', 'y')}")
    after = changed(keep_channels_first, model)
    assert "Transpose" not in _used(after)
    assert_same(model, after, random_feeds(model, N=5))


def test_sums_per_channel_take_channels_first() -> None:
    model = _model(
        f"z = Relu (pa) {_BACK.format('z', 'y')} s = ReduceSum <keepdims = 0> (z, space) "
        "c = ReduceSum <keepdims = 0> (s, samples) k = Size (z)",
        "float[3, N, 4] y, float[3] c, int64 k",
    )
    after = changed(keep_channels_first, model)
    assert "Transpose" not in _used(after)
    assert _used(after).count("ReduceSum") == 1
    assert_same(model, after, random_feeds(model, N=5))


def test_other_readers_share_one_transpose() -> None:
    model = _model(
        f"z = Relu (pa) {_BACK.format('z', 'y')} e = Exp (z) g = Exp (z)",
        "float[3, N, 4] y, float[N, 3, 2, 2] e, float[N, 3, 2, 2] g",
    )
    after = changed(keep_channels_first, model)
    assert _used(after).count("Transpose") == 1
    assert_same(model, after, random_feeds(model, N=5))


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        pytest.param("y = Relu (pa)", "float[N, 3, 2, 2] y", id="nobody wants it first"),
        pytest.param("r = Relu (pa) y = Exp (r)", "float[N, 3, 2, 2] y", id="read by others"),
        pytest.param(
            f"e = Exp (pb) z = Add (pa, e) {_BACK.format('z', 'y')}",
            "float[3, N, 4] y",
            id="another operand lies otherwise",
        ),
    ],
)
def test_left_alone(body: str, outputs: str) -> None:
    assert_unchanged(keep_channels_first, _model(body, outputs))


def test_a_plane_of_another_shape_is_not_mixed_up() -> None:
    model = parse(
        "g (float[4, N, 3] a) => (float[3, N, 4] y) <int64[4] planes = {-1, 4, 3, 1}, "
        "int64[3] flat = {-1, 3, 4}> { t = Transpose <perm = [1, 0, 2]> (a) "
        "p = Reshape (t, planes) r = Relu (p) f = Reshape (r, flat) "
        "y = Transpose <perm = [1, 0, 2]> (f) }"
    )
    assert_unchanged(keep_channels_first, model)
    assert op_types(model.graph).count("Transpose") == 2
