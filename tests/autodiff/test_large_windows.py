"""A gradient has as many nodes for a large window as for a small one."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from odtpack.errors import OdtpackError
from odtpack.model.loading import infer_shapes
from tests.autodiff.oracle import LEVELS, add_gradients, session, spread


def model(op: str, size: str, opset: int = 17, **attributes: object) -> ir.Model:
    written = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    text = (
        f'<ir_version: 8, opset_import: ["" : {opset}]> '
        f"g (float[{size}] x) => (float[a, b, c, d] y) {{ y = {op} <{written}> (x) }}"
    )
    return infer_shapes(ir.from_proto(onnx.parser.parse_model(text)))


@pytest.mark.parametrize("size", ["1, 2, 60, 80", "n, 2, 60, 80", "n, c, h, w"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [31, 31], "pads": [15, 15, 15, 15]},
        {"kernel_shape": [6, 8], "dilations": [10, 10]},
        {"kernel_shape": [60, 80]},
    ],
    ids=["large", "dilated", "whole"],
)
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_nodes_do_not_grow_with_the_window(
    op: str, attributes: dict[str, object], size: str
) -> None:
    if op != "MaxPool" and "dilations" in attributes:
        opset = 19 if op == "AveragePool" else 18
    else:
        opset = 17
    built, _ = add_gradients(model(op, size, opset, **attributes), ["x"])
    assert len(built.graph) <= 100
    assert len(ir.to_proto(built).SerializeToString()) < 200_000


@pytest.mark.parametrize("level", LEVELS)
def test_a_window_that_sees_no_number_takes_no_cotangent(level: str) -> None:
    """Such a maximum has no place in the plane: the kernel reports one outside of it."""
    built, names = add_gradients(
        model("MaxPool", "1, 2, 6, 6", kernel_shape=[5, 5], strides=[1, 1]), ["x"]
    )
    x = spread(1, 2, 6, 6)
    x[0, 0, :5, :5] = -np.inf  # the first window of the first plane
    x[0, 1, 1:, 1:] = -np.inf  # the last window of the second
    seed = np.arange(1, 9, dtype=np.float32).reshape(1, 2, 2, 2)
    (dx,) = session(ir.to_proto(built), level).run([names["x"]], {"x": x, "seed_y": seed})
    assert not dx[np.isinf(x)].any()
    np.testing.assert_array_equal(dx.sum((2, 3)), [[10 - 1, 26 - 8]])


def test_too_large_a_window_for_an_old_opset_is_refused() -> None:
    with pytest.raises(OdtpackError, match="window of 4800 elements is too large") as error:
        add_gradients(model("MaxPool", "1, 2, 60, 80", 13, kernel_shape=[60, 80]), ["x"])
    assert error.value.code == "unsupported-node"
