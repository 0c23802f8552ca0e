"""Work counted from shapes, against products counted one by one and against other formulas."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from odtpack_simulator.memory.operator_work import Tensor, Work, operator_work


def tensors(*shapes: tuple[int, ...], itemsize: float = 4) -> list[Tensor]:
    return [Tensor(shape, itemsize) for shape in shapes]


def inferred_output(
    op_type: str, *shapes: tuple[int, ...], **attributes: object
) -> tuple[int, ...]:
    """Shape of the result as ONNX infers it."""
    names = [f"i{index}" for index in range(len(shapes))]
    graph = helper.make_graph(
        [helper.make_node(op_type, names, ["o"], **attributes)],
        "one",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in zip(names, shapes, strict=True)
        ],
        [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)],
    )
    model = onnx.ModelProto(ir_version=8, graph=graph)
    model.opset_import.append(helper.make_opsetid("", 17))
    found = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output[0]
    return tuple(size.dim_value for size in found.type.tensor_type.shape.dim)


def products_of_conv(
    x: tuple[int, ...], w: tuple[int, ...], out: tuple[int, ...], groups: int
) -> int:
    """Walk every output element, and every weight that it takes."""
    count = 0
    for _, channel, *_ in itertools.product(*map(range, out)):
        group = channel // (w[0] // groups)
        first = group * (x[1] // groups)
        for _, _ in itertools.product(
            range(first, first + x[1] // groups), itertools.product(*map(range, w[2:]))
        ):
            count += 1
    return count


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3),
    per_group=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    pad=st.integers(0, 2),
    batch=st.integers(1, 2),
)
def test_conv(
    groups: int,
    per_group: tuple[int, int],
    kernel: tuple[int, int],
    stride: int,
    dilation: int,
    pad: int,
    batch: int,
) -> None:
    x = (batch, groups * per_group[0], 7, 6)
    w = (groups * per_group[1], per_group[0], *kernel)
    out = inferred_output(
        "Conv", x, w, group=groups, strides=[stride] * 2, dilations=[dilation] * 2, pads=[pad] * 4
    )
    work = operator_work("Conv", tensors(x, w), tensors(out))
    assert work.flops == 2 * products_of_conv(x, w, out, groups)
    assert work.moved_bytes == 4 * (np.prod(x) + np.prod(w) + np.prod(out))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv_transpose_is_the_gradient_of_a_conv(groups: int, stride: int) -> None:
    """It has as many products as the Conv whose input gradient it is, where nothing is cut off."""
    x, w = (2, 4, 9, 9), (6, 4 // groups, 3, 3)
    forward = inferred_output("Conv", x, w, group=groups, strides=[stride] * 2)
    back = inferred_output("ConvTranspose", forward, w, group=groups, strides=[stride] * 2)
    assert back == x
    gradient = operator_work("ConvTranspose", tensors(forward, w), tensors(x))
    assert gradient.flops == operator_work("Conv", tensors(x, w), tensors(forward)).flops


@pytest.mark.parametrize("transA", [0, 1])
@pytest.mark.parametrize("transB", [0, 1])
def test_gemm(transA: int, transB: int) -> None:
    m, k, n = 3, 5, 7
    a, b = ((k, m) if transA else (m, k)), ((n, k) if transB else (k, n))
    out = inferred_output("Gemm", a, b, (n,), transA=transA, transB=transB)
    work = operator_work("Gemm", tensors(a, b, (n,)), tensors(out))
    assert work.flops == 2 * m * k * n
    assert work.moved_bytes == 4 * (m * k + k * n + n + m * n)
    assert operator_work("FusedGemm", tensors(a, b), tensors(out)).flops == 2 * m * k * n


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 5), (5, 7)),
        ((2, 3, 5), (5, 7)),
        ((3, 5), (4, 5, 7)),
        ((2, 1, 3, 5), (1, 4, 5, 7)),
        ((5,), (5, 7)),
        ((3, 5), (5,)),
        ((5,), (5,)),
    ],
)
def test_matmul_with_broadcasting(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    result = np.matmul(np.ones(a), np.ones(b))  # of ones, every element is its number of products
    work = operator_work("MatMul", tensors(a, b), tensors(result.shape))
    assert work.flops == 2 * result.sum()


@pytest.mark.parametrize("transA", [0, 1])
@pytest.mark.parametrize("transBatchA", [0, 1])
def test_fused_matmul_without_its_attributes(transA: int, transBatchA: int) -> None:
    batch, m, k, n = 2, 3, 5, 7
    a = [batch, k, m] if transA else [batch, m, k]
    if transBatchA:
        a[0], a[1] = a[1], a[0]
    work = operator_work("FusedMatMul", tensors(tuple(a), (batch, k, n)), tensors((batch, m, n)))
    assert work.flops == 2 * batch * m * k * n


@pytest.mark.parametrize("a", [(3, 5), (5, 3), (1, 3, 5)])
def test_fused_matmul_that_broadcasts(a: tuple[int, ...]) -> None:
    work = operator_work("FusedMatMul", tensors(a, (4, 5, 7)), tensors((4, 3, 7)))
    assert work.flops == 2 * 4 * 3 * 5 * 7


@pytest.mark.parametrize(("op_type", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent(op_type: str, gates: int, directions: int) -> None:
    steps, batch, size, hidden = 6, 2, 3, 5
    shapes = (
        (steps, batch, size),
        (directions, gates * hidden, size),
        (directions, gates * hidden, hidden),
    )
    products = 0
    for _ in range(steps * directions * gates):
        products += batch * hidden * size + batch * hidden * hidden
    result = tensors((steps, directions, batch, hidden))
    assert operator_work(op_type, tensors(*shapes), result).flops == 2 * products


def test_attention_is_its_matrix_products() -> None:
    batch, heads, queries, keys, depth, value_depth = 2, 4, 6, 9, 8, 5
    scores = operator_work(
        "MatMul",
        tensors((batch, heads, queries, depth), (batch, heads, depth, keys)),
        tensors((batch, heads, queries, keys)),
    )
    values = operator_work(
        "MatMul",
        tensors((batch, heads, queries, keys), (batch, heads, keys, value_depth)),
        tensors((batch, heads, queries, value_depth)),
    )
    assert scores.flops is not None
    assert values.flops is not None
    four = (
        (batch, heads, queries, depth),
        (batch, heads, keys, depth),
        (batch, heads, keys, value_depth),
    )
    three = (
        (batch, queries, heads * depth),
        (batch, keys, heads * depth),
        (batch, keys, heads * value_depth),
    )
    for op_type, inputs, result in (
        ("Attention", four, (batch, heads, queries, value_depth)),
        ("Attention", three, (batch, queries, heads * value_depth)),
        ("MultiHeadAttention", three, (batch, queries, heads * value_depth)),
    ):
        work = operator_work(op_type, tensors(*inputs), tensors(result))
        assert work.flops == scores.flops + values.flops


def test_packed_attention() -> None:
    """Three projections, then scores and values of all heads together."""
    batch, length, size, inner = 2, 6, 8, 12
    work = operator_work(
        "Attention",
        tensors((batch, length, size), (size, 3 * inner), (3 * inner,)),
        tensors((batch, length, inner)),
    )
    projections = 3 * batch * length * size * inner
    assert work.flops == 2 * (projections + 2 * batch * length * length * inner)


def test_quantized_products() -> None:
    x, w, out = (1, 4, 5, 5), (6, 4, 3, 3), (1, 6, 3, 3)
    plain = operator_work("Conv", tensors(x, w), tensors(out)).flops
    assert operator_work("ConvInteger", tensors(x, w), tensors(out)).flops == plain
    scaled = tensors(x, (), (), w, (), (), (), (), itemsize=1)
    assert operator_work("QLinearConv", scaled, tensors(out, itemsize=1)).flops == plain


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs", "nbytes"),
    [
        ("Add", [(10, 10), (10,)], [(10, 10)], 4 * 210),
        ("Reshape", [(10, 10), (2,)], [(100,)], 0),
        ("Shape", [(1000, 1000)], [(2,)], 8),
        ("Gather", [(1000, 10), (3,)], [(3, 10)], 4 * (30 + 30 + 3)),
        ("Slice", [(1000, 10), (1,), (1,)], [(5, 10)], 4 * (50 + 50 + 2)),
        ("ScatterND", [(1000, 10), (3, 1), (3, 10)], [(1000, 10)], 4 * (3 + 30 + 30)),
        ("ConstantOfShape", [], [(8, 8)], 4 * 64),
        ("ReduceSum", [(10, 10)], [(10, 1)], 4 * 110),
    ],
)
def test_least_traffic(
    op_type: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], nbytes: int
) -> None:
    assert operator_work(op_type, tensors(*inputs), tensors(*outputs)) == Work(None, nbytes)


def test_bytes_per_element_count() -> None:
    half = operator_work("Relu", tensors((10,), itemsize=2), tensors((10,), itemsize=2))
    assert half.moved_bytes == 40


@pytest.mark.parametrize("op_type", ["Gemm", "MatMul", "FusedMatMul", "LSTM", "Attention", "Conv"])
@pytest.mark.parametrize("shapes", [[], [()], [(0, 3)], [(2,)], [(0, 3), (3, 0)]])
def test_odd_shapes_have_no_arithmetic_or_none_at_all(
    op_type: str, shapes: list[tuple[int, ...]]
) -> None:
    """A profile comes from a model that nobody here wrote."""
    work = operator_work(op_type, tensors(*shapes), tensors((0, 0)))
    assert work.flops in (None, 0)
    assert work.moved_bytes >= 0
