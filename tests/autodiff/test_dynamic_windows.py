"""One gradient graph serves planes of every size."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import LEVELS, add_gradients, normal, run, session, spread
from tests.model_text import inferred
from tests.refused import refused

MODEL = """
net (float["n", 3, "h", "w"] x, float[4, 3, 3, 3] a, float[4, 1, 3, 3] c, float[4, 2, 2, 2] t)
    => (float["n", 4, 1, 1] y)
{
    first = Conv <strides = [2, 1], pads = [1, 1, 1, 1]> (x, a)
    peaks = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (first)
    second = Conv <group = 4, auto_pad = "SAME_UPPER"> (peaks, c)
    wide = ConvTranspose <group = 2, strides = [2, 2]> (second, t)
    mean = AveragePool <kernel_shape = [2, 3], strides = [2, 2], pads = [0, 1, 0, 1]> (wide)
    y = GlobalAveragePool (mean)
}
"""


def net(x: torch.Tensor, a: torch.Tensor, c: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    x = F.max_pool2d(F.conv2d(x, a, stride=(2, 1), padding=1), 3, 2, 1)
    x = F.conv_transpose2d(F.conv2d(x, c, padding=1, groups=4), t, stride=2, groups=2)
    return F.avg_pool2d(x, (2, 3), 2, (0, 1), count_include_pad=False).mean((2, 3), True)


@pytest.mark.parametrize("level", LEVELS)
def test_one_graph_trains_on_planes_of_several_sizes(level):
    model = inferred(MODEL)
    wrt = [value.name or "" for value in model.graph.inputs]
    model, names = add_gradients(model, wrt)
    running = session(model, level)
    weights = {"a": normal(4, 3, 3, 3, seed=1), "c": normal(4, 1, 3, 3, seed=2)}
    weights["t"] = normal(4, 2, 2, 2, seed=3)
    for samples, height, width in ((2, 9, 8), (1, 6, 13), (3, 12, 5)):
        feeds = {"x": normal(samples, 3, height, width, seed=height), **weights}
        tensors = [torch.tensor(feeds[name]).double().requires_grad_() for name in wrt]
        y = net(*tensors)
        seed = normal(*y.shape, seed=4)
        expected = torch.autograd.grad((y * torch.tensor(seed)).sum(), tensors)
        found = running.run([names[name] for name in wrt], {**feeds, "seed_y": seed})
        for name, wanted, gradient in zip(wrt, expected, found, strict=True):
            np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5, err_msg=name)


# A gradient has as many nodes for a large window as for a small one.


def model(op: str, size: str, opset: int = 17, **attributes: object) -> ir.Model:
    written = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    text = f"g (float[{size}] x) => (float[a, b, c, d] y) {{ y = {op} <{written}> (x) }}"
    return inferred(text, opset)


@pytest.mark.parametrize("size", ["1, 2, 60, 80", "n, 2, 60, 80", "n, c, h, w"])
@pytest.mark.parametrize("attributes", [
    {"kernel_shape": [31, 31], "pads": [15, 15, 15, 15]},
    {"kernel_shape": [6, 8], "dilations": [10, 10]},
    {"kernel_shape": [60, 80]},
], ids=["large", "dilated", "whole"])  # fmt: skip
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_nodes_do_not_grow_with_the_window(op, attributes, size):
    if op != "MaxPool" and "dilations" in attributes:
        opset = 19 if op == "AveragePool" else 18
    else:
        opset = 17
    built, _ = add_gradients(model(op, size, opset, **attributes), ["x"])
    assert len(built.graph) <= 100
    assert len(ir.to_proto(built).SerializeToString()) < 200_000


@pytest.mark.parametrize("level", LEVELS)
def test_a_window_that_sees_no_number_takes_no_cotangent(level):
    """Such a maximum has no place in the plane: the kernel reports one outside of it."""
    built, names = add_gradients(
        model("MaxPool", "1, 2, 6, 6", kernel_shape=[5, 5], strides=[1, 1]), ["x"]
    )
    x = spread(1, 2, 6, 6)
    x[0, 0, :5, :5] = -np.inf  # the first window of the first plane
    x[0, 1, 1:, 1:] = -np.inf  # the last window of the second
    seed = np.arange(1, 9, dtype=np.float32).reshape(1, 2, 2, 2)
    dx = run(built, {"x": x, "seed_y": seed}, level)[names["x"]]
    assert not dx[np.isinf(x)].any()
    np.testing.assert_array_equal(dx.sum((2, 3)), [[10 - 1, 26 - 8]])


def test_too_large_a_window_for_an_old_opset_is_refused():
    with refused("unsupported-node", "window of 4800 elements is too large"):
        add_gradients(model("MaxPool", "1, 2, 60, 80", 13, kernel_shape=[60, 80]), ["x"])
