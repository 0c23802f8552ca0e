from __future__ import annotations

import pytest

from odtpack.passes.patterns import pool_before_relu
from tests.passes.tools import assert_same, assert_unchanged, changed, op_types, parse, random_feeds

SHAPE = "float[N, 3, 9, 9]"


def _model(body: str, outputs: str = "float[N, 3, h, w] y", shape: str = SHAPE):
    return parse(f"g ({shape} x) => ({outputs}) {{ {body} }}", domains=', "my" : 1')


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        (SHAPE, "kernel_shape = [2, 2], strides = [2, 2]"),
        (SHAPE, "kernel_shape = [3, 3], pads = [1, 1, 1, 1]"),
        (SHAPE, "kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1"),
        (SHAPE, 'kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_UPPER"'),
        (SHAPE, "kernel_shape = [2, 2], dilations = [2, 3]"),
        ("float[N, 3, 9]", "kernel_shape = [3]"),
    ],
)
def test_swapped(shape: str, attributes: str) -> None:
    outputs = shape.replace("9", "h", 1).replace("9", "w") + " y"
    model = _model(f"r = Relu(x) y = MaxPool <{attributes}> (r)", outputs, shape)
    after = changed(pool_before_relu, model)
    assert op_types(after.graph) == ["MaxPool", "Relu"]
    pool, relu = after.graph
    assert relu.outputs[0].name == "y"
    assert pool.attributes.keys() >= {"kernel_shape"}
    assert_same(model, after, random_feeds(model, N=2))
    assert_same(model, after, {"x": -abs(random_feeds(model, N=2)["x"])})


def test_two_in_a_row() -> None:
    model = _model(
        "a = Relu(x) b = MaxPool <kernel_shape = [2, 2]> (a)"
        "c = Relu(b) y = MaxPool <kernel_shape = [2, 2]> (c)"
    )
    after = changed(pool_before_relu, model)
    assert op_types(after.graph) == ["MaxPool", "Relu", "MaxPool", "Relu"] or op_types(
        after.graph
    ) == ["MaxPool", "MaxPool", "Relu", "Relu"]
    assert_same(model, after, random_feeds(model, N=2))


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        pytest.param(
            "r = Relu(x) y = AveragePool <kernel_shape = [2, 2]> (r)", "", id="another pool"
        ),
        pytest.param(
            "r = Tanh(x) y = MaxPool <kernel_shape = [2, 2]> (r)", "", id="another function"
        ),
        pytest.param(
            "r = my.Relu(x) y = MaxPool <kernel_shape = [2, 2]> (r)", "", id="another domain"
        ),
        pytest.param(
            "r = Relu(x) y = MaxPool <kernel_shape = [2, 2]> (r) z = Neg(r)",
            f"float[N, 3, h, w] y, {SHAPE} z",
            id="read elsewhere",
        ),
        pytest.param(
            "r = Relu(x) y = MaxPool <kernel_shape = [2, 2]> (r)",
            f"float[N, 3, h, w] y, {SHAPE} r",
            id="an output",
        ),
        pytest.param(
            "r = Relu(x) y, i = MaxPool <kernel_shape = [2, 2]> (r)",
            "float[N, 3, h, w] y, int64[N, 3, h, w] i",
            id="indices",
        ),
        pytest.param("y = MaxPool <kernel_shape = [2, 2]> (x)", "", id="no relu"),
    ],
)
def test_something_else(body: str, outputs: str) -> None:
    assert_unchanged(pool_before_relu, _model(body, *([outputs] if outputs else [])))
