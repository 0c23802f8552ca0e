from __future__ import annotations

import pytest

from odtpack.passes.patterns import fuse_layer_norm
from tests.passes.tools import assert_same, assert_unchanged, changed, op_types, parse, random_feeds

HEAD = "layer_norm (float[N, 3, 4] x, float[4] scale, float[4] bias) => (float[N, 3, 4] y)"
EPSILON = "eps = Constant <value = float {1e-3}> () two = Constant <value = float {2}> ()"
BODY = """
    mean = ReduceMean <axes = [-1]> (x)
    d = Sub(x, mean)
    square = Pow(d, two)
    var = ReduceMean <axes = [-1]> (square)
    plus = Add(var, eps)
    root = Sqrt(plus)
    normal = Div(d, root)
    scaled = Mul(normal, scale)
    y = Add(scaled, bias)
"""


def _model(body: str = BODY, head: str = HEAD, opset: int = 17):
    return parse(f"{head} {{ {EPSILON} {body} }}", opset)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("Pow(d, two)", "Mul(d, d)"),
        ("Mul(normal, scale)", "Mul(scale, normal)"),
        ("Add(scaled, bias)", "Add(bias, scaled)"),
        ("Add(var, eps)", "Add(eps, var)"),
        ("axes = [-1]", "axes = [2]"),
    ],
)
def test_written_out(old: str, new: str) -> None:
    model = _model(BODY.replace(old, new) if old else BODY)
    after = changed(fuse_layer_norm, model)
    nodes = [node for node in after.graph if node.op_type != "Constant"]
    (node,) = nodes
    assert node.op_type == "LayerNormalization"
    assert node.attributes.get_float("epsilon") == pytest.approx(1e-3)
    assert_same(model, after, random_feeds(model, N=5))


def test_two_axes() -> None:
    head = "g (float[N, 3, 4] x, float[3, 4] scale, float[3, 4] bias) => (float[N, 3, 4] y)"
    model = _model(BODY.replace("[-1]", "[-2, -1]"), head)
    after = changed(fuse_layer_norm, model)
    assert op_types(after.graph)[-1] == "LayerNormalization"
    assert_same(model, after, random_feeds(model, N=5))


def test_axes_as_input() -> None:
    body = "axis = Constant <value = int64[1] {-1}> ()" + BODY.replace(
        "<axes = [-1]> (x)", "(x, axis)"
    ).replace("<axes = [-1]> (square)", "(square, axis)")
    model = _model(body, opset=18)
    after = changed(fuse_layer_norm, model)
    assert "ReduceMean" not in op_types(after.graph)
    assert_same(model, after, random_feeds(model, N=5))


def test_two_in_a_row() -> None:
    def layer(x: str, y: str) -> str:
        return f"""
            {y}_mean = ReduceMean <axes = [-1]> ({x})
            {y}_d = Sub({x}, {y}_mean)
            {y}_square = Pow({y}_d, two)
            {y}_var = ReduceMean <axes = [-1]> ({y}_square)
            {y}_plus = Add({y}_var, eps)
            {y}_root = Sqrt({y}_plus)
            {y}_normal = Div({y}_d, {y}_root)
            {y}_scaled = Mul({y}_normal, scale)
            {y} = Add({y}_scaled, bias)
        """

    model = _model(layer("x", "middle") + layer("middle", "y"))
    after = changed(fuse_layer_norm, model)
    assert op_types(after.graph).count("LayerNormalization") == 2
    assert_same(model, after, random_feeds(model, N=5))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("Pow(d, two)", "Pow(d, eps)", id="another power"),
        pytest.param("Pow(d, two)", "Mul(d, x)", id="not a square"),
        pytest.param("Pow(d, two)", "Pow(x, two)", id="square of something else"),
        pytest.param("Sub(x, mean)", "Sub(mean, x)", id="the other sign"),
        pytest.param("Div(d, root)", "Div(root, d)", id="upside down"),
        pytest.param("Div(d, root)", "Div(x, root)", id="not centered"),
        pytest.param("axes = [-1]> (x)", "axes = [-2]> (x)", id="two different axes"),
        pytest.param("axes = [-1]", "axes = [1]", id="not the last axis"),
        pytest.param("Add(var, eps)", "Add(var, root0)", id="epsilon is computed"),
        pytest.param("Mul(normal, scale)", "Mul(normal, two)", id="scale is a number"),
        pytest.param("Add(scaled, bias)", "Add(scaled, two)", id="bias is a number"),
    ],
)
def test_something_else(old: str, new: str) -> None:
    assert old in BODY
    body = BODY.replace(old, new)
    assert_unchanged(fuse_layer_norm, _model("root0 = Sqrt(two)" + body))


def test_an_epsilon_with_more_axes_adds_them() -> None:
    """The result is [1, N, 3, 4] then."""
    wide = "wide = Constant <value = float[1, 1, 1, 1] {1e-3}> ()"
    head = HEAD.replace("float[N, 3, 4] y", "float[1, N, 3, 4] y")
    assert_unchanged(
        fuse_layer_norm, _model(wide + BODY.replace("Add(var, eps)", "Add(var, wide)"), head)
    )


@pytest.mark.parametrize("name", ["mean", "d", "var", "normal", "scaled"])
def test_a_part_is_read_elsewhere(name: str) -> None:
    head = HEAD.replace("float[N, 3, 4] y)", "float[N, 3, 4] y, float[N, 3, k] other)")
    assert_unchanged(fuse_layer_norm, _model(BODY + f"other = Neg({name})", head))


@pytest.mark.parametrize("name", ["mean", "d", "scaled"])
def test_a_part_is_an_output(name: str) -> None:
    head = HEAD.replace("[N, 3, 4] y)", f"[N, 3, 4] y, float[N, 3, k] {name})")
    assert_unchanged(fuse_layer_norm, _model(BODY, head))


@pytest.mark.parametrize("dims", ["1", "3, 4", "1, 4", "k"])
def test_the_scale_has_another_shape(dims: str) -> None:
    assert_unchanged(
        fuse_layer_norm, _model(head=HEAD.replace("float[4] scale", f"float[{dims}] scale"))
    )


def test_unknown_sizes_are_not_equal_sizes() -> None:
    """A scale of unknown length may have length one and be broadcast."""
    head = "g (float[N, k, 3] a, int64[2] s, int64[1] t, float[m] bias) => (float[p, q] y)"
    body = "x = Reshape(a, s) flat = Reshape(bias, t) scale = Neg(flat)" + BODY.replace(
        ", bias)", ", scale)"
    )
    assert_unchanged(fuse_layer_norm, _model(body, head))


def test_without_kept_axes() -> None:
    body = BODY.replace("<axes = [-1]>", "<axes = [-1], keepdims = 0>")
    head = "g (float[4, 4] x, float[4] scale, float[4] bias) => (float[4, 4] y)"
    assert_unchanged(fuse_layer_norm, _model(body, head))


def test_the_operator_is_too_new() -> None:
    assert_unchanged(fuse_layer_norm, _model(opset=16))
