from __future__ import annotations

import numpy as np
import pytest

from odtpack.passes.layout import small_convolutions
from tests.passes.tools import assert_same, assert_unchanged, changed, op_types, parse, random_feeds


def _model(x: str, w: str, attributes: str = "", bias: str = "", out: str = "N, o, h, w"):
    inputs = f"float[{x}] x, float[{w}] w" + (f", float[{bias}] b" if bias else "")
    call = "(x, w, b)" if bias else "(x, w)"
    settings = f"<{attributes}>" if attributes else ""
    return parse(f"g ({inputs}) => (float[{out}] y) {{ y = Conv {settings} {call} }}")


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        pytest.param("N, 5, 3, 4", "6, 5, 1, 1", "", id="1x1"),
        pytest.param("2, 5, 7, 7", "6, 5, 1, 1", "kernel_shape = [1, 1]", id="fixed batch"),
        pytest.param("N, 6, 5, 5", "6, 1, 3, 3", "group = 6", id="depthwise"),
        pytest.param("N, 6, 5, 4", "6, 1, 3, 3", "group = 6, pads = [1, 1, 1, 1]", id="padded"),
        pytest.param(
            "N, 6, 8, 7",
            "6, 1, 3, 3",
            "group = 6, pads = [1, 0, 2, 1], strides = [2, 2]",
            id="strides",
        ),
        pytest.param("N, 6, 8, 8", "6, 1, 2, 3", "group = 6, dilations = [3, 2]", id="dilations"),
        pytest.param(
            "N, 6, 8, 8",
            "6, 1, 3, 3",
            'group = 6, auto_pad = "SAME_LOWER", strides = [3, 3]',
            id="same",
        ),
    ],
)
def test_rewritten(x: str, w: str, attributes: str, bias: bool) -> None:
    model = _model(x, w, attributes, "6" if bias else "")
    after = changed(small_convolutions, model)
    assert "Conv" not in op_types(after.graph)
    assert {"MatMul", "Gemm"} & set(op_types(after.graph))
    assert after.graph.outputs[0].name == "y"
    assert_same(model, after, random_feeds(model, N=3))


def test_a_line() -> None:
    model = _model("N, 5, 9", "6, 5, 1", bias="6", out="N, 6, 9")
    after = changed(small_convolutions, model)
    assert "Conv" not in op_types(after.graph)
    assert_same(model, after, random_feeds(model, N=3))


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        pytest.param("N, 5, 9, 9", "6, 5, 1, 1", "", id="many pixels"),
        pytest.param("N, 6, 40, 40", "6, 1, 3, 3", "group = 6", id="a large band"),
        pytest.param("N, 5, 3, 3", "6, 5, 3, 3", "pads = [1, 1, 1, 1]", id="a full kernel"),
        pytest.param("N, 6, 3, 3", "6, 3, 1, 1", "group = 2", id="groups"),
        pytest.param("N, 6, 3, 3", "12, 1, 3, 3", "group = 6", id="two features for a channel"),
        pytest.param("N, 5, 3, 3", "6, 5, 1, 1", "strides = [2, 2]", id="1x1 with strides"),
        pytest.param("N, 5, 3, 3", "6, 5, 1, 1", "pads = [1, 1, 1, 1]", id="1x1 with padding"),
        pytest.param("N, 5, k, 3", "6, 5, 1, 1", "", id="unknown size"),
    ],
)
def test_left_alone(x: str, w: str, attributes: str) -> None:
    assert_unchanged(small_convolutions, _model(x, w, attributes))


def test_a_constant_weight() -> None:
    model = parse(
        "g (float[N, 2, 3, 3] x) => (float[N, 1, 3, 3] y)"
        "{ w = Constant <value = float[1, 2, 1, 1] {1, 2}> () y = Conv(x, w) }"
    )
    assert_unchanged(small_convolutions, model)


def test_a_computed_weight() -> None:
    model = parse(
        "g (float[N, 2, 3, 3] x, float[1, 2, 1, 1] v) => (float[N, 1, 3, 3] y)"
        "{ w = Neg(v) y = Conv(x, w) }"
    )
    assert_unchanged(small_convolutions, model)


def test_the_batch_stays_free() -> None:
    model = _model("N, 5, 3, 4", "6, 5, 1, 1")
    after = changed(small_convolutions, model)
    for size in (1, 4):
        assert_same(model, after, random_feeds(model, N=size))
    assert not isinstance(after.graph.outputs[0].shape[0], int)
    assert np.prod(after.graph.outputs[0].shape[2:]) == 12
