"""out = gradient if reset else buffer + gradient, in three ways."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from odtpack.graph.graphs import static_dims
from odtpack.graph.ops import Ops
from odtpack.passes import aliases
from odtpack.passes.gradient_buffers import accumulate
from tests.passes.tools import check, op_types, parse, run

PRODUCT = "g (float[{m}, {k}] a, float[{k}, {n}] b) => ({outputs}) {{ {body} }}"
ELEMENTWISE = "g (float{shape} a) => (float{shape} y) {{ gradient = Neg(a) y = Abs(gradient) }}"


def _accumulated(model: ir.Model) -> ir.Model:
    """The model with the accumulation of the value ``gradient`` as output ``out``."""
    graph = model.graph
    gradient = next(y for node in graph for y in node.outputs if y.name == "gradient")
    dims = static_dims(gradient)
    buffer = ir.val("buffer", dtype=ir.DataType.FLOAT, shape=dims)
    reset = ir.val("reset", dtype=ir.DataType.BOOL, shape=[])
    graph.inputs.extend([buffer, reset])
    graph.outputs[:] = [value for value in graph.outputs if value is not gradient]
    out = accumulate(Ops(graph, "new/"), gradient, buffer, reset)
    out.name, out.shape = "out", ir.Shape(dims)
    graph.outputs.append(out)
    aliases.verify(graph, buffer, out)
    return check(model)


def _check(model: ir.Model) -> None:
    random = np.random.default_rng(0)
    feeds = {
        value.name: random.standard_normal(static_dims(value), dtype=np.float32)
        for value in model.graph.inputs[:-1]
    }
    gradient = -feeds["a"] if "b" not in feeds else feeds["a"] @ feeds["b"]
    added = run(model, feeds | {"reset": np.array(False)})["out"]
    np.testing.assert_allclose(added, feeds["buffer"] + gradient, rtol=1e-5, atol=1e-5)
    fresh = run(model, feeds | {"reset": np.array(True)})["out"]
    np.testing.assert_allclose(fresh, gradient, rtol=1e-5, atol=1e-5)
    # What a step that diverged has left is forgotten.
    feeds["buffer"] = np.full_like(feeds["buffer"], np.nan)
    np.testing.assert_array_equal(run(model, feeds | {"reset": np.array(True)})["out"], fresh)


@pytest.mark.parametrize("shape", ["", "[1]", "[100]", "[5, 6]", "[1, 1, 1]", "[2, 0]"])
def test_small(shape: str) -> None:
    model = _accumulated(parse(ELEMENTWISE.format(shape=shape)))
    assert op_types(model.graph) == ["Neg", "Abs", "Where", "Add"]
    _check(model)


@pytest.mark.parametrize("shape", ["[40000]", "[40, 30]", "[64, 3, 3, 3]"])
def test_large(shape: str) -> None:
    model = _accumulated(parse(ELEMENTWISE.format(shape=shape)))
    assert op_types(model.graph) == ["Neg", "Abs", "If"]
    _check(model)


def _product(m: int, k: int, n: int, body: str, outputs: str = "") -> ir.Model:
    outputs = outputs or f"float[{m}, {n}] gradient"
    return parse(PRODUCT.format(m=m, k=k, n=n, body=body, outputs=outputs))


@pytest.mark.parametrize(
    "body",
    ["gradient = Gemm(a, b)", "t = Transpose(a) gradient = Gemm <transA = 1> (t, b)"],
)
def test_a_product_moves_into_the_branches(body: str) -> None:
    model = _accumulated(_product(40, 3, 30, body))
    assert "Gemm" not in op_types(model.graph)
    assert sorted(op_types(model.graph.node(-1).attributes["else_branch"].as_graph())) == [
        "Add",
        "Gemm",
    ]
    assert op_types(model.graph.node(-1).attributes["then_branch"].as_graph()) == ["Gemm"]
    _check(model)


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        pytest.param("gradient = MatMul(a, b)", "", id="another operator"),
        pytest.param(
            "gradient = Gemm(a, b) other = Neg(gradient)",
            "float[40, 30] other",
            id="read elsewhere",
        ),
        pytest.param("zero = Sub(c, c) gradient = Gemm(a, b, zero)", "", id="an addend"),
    ],
)
def test_a_product_that_stays(body: str, outputs: str) -> None:
    if "zero" in body:
        body = "c = Constant <value = float[1] {1}> ()" + body
    model = _accumulated(_product(40, 3, 30, body, outputs))
    assert {"Gemm", "MatMul"} & set(op_types(model.graph))
    _check(model)


def test_a_small_product_stays() -> None:
    model = _accumulated(_product(4, 3, 5, "gradient = Gemm(a, b)"))
    assert op_types(model.graph) == ["Gemm", "Where", "Add"]
    _check(model)


def test_names_in_the_branches_are_new() -> None:
    model = parse(
        'g (float[40, 3] a, float[3, 30] b) => (float[40, 30] gradient, float[1] "t")'
        "{ gradient = Gemm(a, b) t = Constant <value = float[1] {1}> () }"
    )
    value = next(y for node in model.graph for y in node.outputs if y.name == "t")
    value.name = "buffer.fresh"
    _check(_accumulated(model))
