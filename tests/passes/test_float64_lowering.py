"""Operators written out in double are right to the last digits, and float32 is left alone."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from odtpack.passes import finishing
from tests.passes.tools import check, op_types, outline, parse, run
from tests.refused import refused

FORWARD = "g (double[N, 4, 7, 6] x) => (double[N, c, h, w] y) {{ {node} }}"

# A node that ONNX Runtime has no kernel for in double, and the same function in PyTorch.
NODES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "AveragePool": ("y = AveragePool <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 0],"
                    " count_include_pad = 1>(x)",
                    lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0))),
    "AveragePool-counted": (
        "y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(x)",
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "AveragePool-gaps": (  # which ONNX Runtime's own kernel would refuse along the last axis
        'y = AveragePool <kernel_shape = [1, 1], strides = [3, 3], auto_pad = "SAME_UPPER">(x)',
        lambda x: x[:, :, ::3, ::3],
    ),
    "Elu": ("y = Elu <alpha = 0.5>(x)", lambda x: F.elu(x, 0.5)),
    "Erf": ("y = Erf(x)", torch.erf),
    "GlobalAveragePool": ("y = GlobalAveragePool(x)", lambda x: x.mean((2, 3), keepdim=True)),
    "GlobalLpPool": ("y = GlobalLpPool <p = 3>(x)",
                     lambda x: (x.abs() ** 3).sum((2, 3), keepdim=True) ** (1 / 3)),
    "GlobalMaxPool": ("y = GlobalMaxPool(x)", lambda x: x.amax((2, 3), keepdim=True)),
    "HardSigmoid": ("y = HardSigmoid <alpha = 0.25, beta = 0.5>(x)",
                    lambda x: (x * 0.25 + 0.5).clip(0, 1)),
    "LeakyRelu": ("y = LeakyRelu <alpha = 0.125>(x)", lambda x: F.leaky_relu(x, 0.125)),
    "LpPool": ("y = LpPool <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 0]>(x)",
               lambda x: F.avg_pool2d(x * x, (3, 2), (2, 1), (1, 0)).mul(6).sqrt()),
    "Mean": ("s = Mul(x, x) y = Mean(x, s)", lambda x: (x + x * x) / 2),
    "Softplus": ("y = Softplus(x)", F.softplus),
    "Softsign": ("y = Softsign(x)", F.softsign),
}  # fmt: skip


@pytest.mark.parametrize("name", NODES)
def test_a_node_is_as_exact_as_double(name):
    text, theirs = NODES[name]
    model = parse(FORWARD.format(node=text))
    assert name.split("-", maxsplit=1)[0] in op_types(model.graph)
    lowered = finishing.lower_doubles(model)
    assert name.split("-", maxsplit=1)[0] not in op_types(lowered.graph)
    check(lowered)
    x = np.random.default_rng(0).standard_normal((2, 4, 7, 6)) * 2
    found = run(lowered, {"x": x})["y"]
    np.testing.assert_allclose(found, theirs(torch.from_numpy(x)).numpy(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_convolutions(kind, groups, stride, dilation):
    inner = 4 // groups if kind == "Conv" else 3
    first = 8 if kind == "Conv" else 4
    extra = stride - 1 if kind == "ConvTranspose" else 0
    more = f", output_padding = [{extra}, 0]" if extra else ""
    model = parse(
        f"g (double[N, 4, 7, 6] x, double[{first}, {inner}, 3, 2] w, double[b] b)"
        f" => (double[N, c, h, w] y) {{ y = {kind} <group = {groups}, strides = [{stride}, 1],"
        f" dilations = [{dilation}, 1], pads = [1, 0, 1, 0]{more}>(x, w, b) }}"
    )
    random = np.random.default_rng(1)
    features = 8 if kind == "Conv" else 3 * groups
    x, w, b = (random.standard_normal(s) for s in ((2, 4, 7, 6), (first, inner, 3, 2), (features,)))
    lowered = finishing.lower_doubles(model)
    assert kind not in op_types(lowered.graph)
    given = [torch.from_numpy(each) for each in (x, w, b)]
    strides, dilations = (stride, 1), (dilation, 1)
    if kind == "Conv":
        wanted = F.conv2d(*given, strides, (1, 0), dilations, groups)
    else:
        wanted = F.conv_transpose2d(*given, strides, (1, 0), (extra, 0), groups, dilations)
    found = run(lowered, {"x": x, "w": w, "b": b})["y"]
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-12, atol=1e-13)


def test_erf_on_the_whole_line():
    lowered = finishing.lower_doubles(
        parse("g (double[N, 1] x) => (double[N, 1] y) { y = Erf(x) }")
    )
    x = np.concatenate([np.linspace(-8, 8, 4001), [-np.inf, np.inf, 1e-300, 0, 1e300]])
    found = run(lowered, {"x": x[:, None]})["y"][:, 0]
    wanted = np.array([math.erf(value) for value in x])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-14)


def test_float32_is_left_alone():
    model = parse(FORWARD.replace("double", "float").format(node="e = Erf(x) y = Softplus(e)"))
    before = outline(model)
    assert finishing.lower_doubles(model) is model
    assert outline(model) == before


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_hot(axis):
    """Indices may be negative; those out of range are off everywhere."""
    model = parse(
        "g (int64[2, 3] i, double[2] values) => (double[a, b, c] y)"
        f" <int64 depth = {{4}}> {{ y = OneHot <axis = {axis}>(i, depth, values) }}"
    )
    i, values = np.array([[0, 3, -1], [2, 7, -9]]), np.array([0.1, 0.7])
    found = run(finishing.lower_doubles(model), {"i": i, "values": values})["y"]
    places = np.expand_dims(i, axis if axis >= 0 else 2)
    steps = np.arange(4).reshape([4 if a == axis % 3 else 1 for a in range(3)])
    hot = (places == steps) | (places == steps - 4)
    np.testing.assert_array_equal(found, np.where(hot, values[1], values[0]))


def test_bodies_are_lowered():
    model = parse(
        "g (bool c, double[3] x) => (double[3] y) { y = If (c)"
        " <then_branch = a () => (double[3] t) { t = Erf(x) },"
        " else_branch = b () => (double[3] e) { e = Neg(x) }> }"
    )
    x = np.array([-0.5, 0.25, 2.0])
    lowered = finishing.lower_doubles(model)
    for condition, wanted in ((True, torch.erf(torch.from_numpy(x)).numpy()), (False, -x)):
        found = run(lowered, {"c": np.array(condition), "x": x})["y"]
        np.testing.assert_allclose(found, wanted, rtol=1e-13)


@pytest.mark.parametrize(
    "node", ["AveragePool <kernel_shape = [2, 2]>(x)", "Conv(x, w)", "ConvTranspose(x, w)"]
)
def test_planes_of_unknown_size_are_refused(node):
    model = parse(f"g (double[N, 4, H, 6] x, double[4, 4, 3, 2] w) => (double[N, c, h, v] y)"
                  f" {{ y = {node} }}")  # fmt: skip
    with refused("unsupported-in-double", r"\[\?, 4, \?, 6\]", "a number in the model"):
        finishing.lower_doubles(model)


def test_dilations_with_auto_pad_are_refused():
    """ONNX Runtime's padding does not know of them, and it runs no Conv with both."""
    model = parse("g (double[N, 4, 7, 6] x, double[4, 4, 3, 2] w) => (double[N, c, h, v] y)"
                  ' { y = Conv <dilations = [2, 2], auto_pad = "SAME_UPPER">(x, w) }')  # fmt: skip
    with refused("unsupported-in-double", "Conv"):
        finishing.lower_doubles(model)
