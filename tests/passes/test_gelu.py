from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.graph.ops import Ops
from odtpack.passes import patterns
from tests.passes.tools import assert_same, check, op_types, outline, parse, random_feeds

CONSTANTS = f"""
    one = Constant <value = float {{1}}> () half = Constant <value = float {{0.5}}> ()
    root2 = Constant <value = float {{{math.sqrt(2)!r}}}> ()
    inverse = Constant <value = float {{{math.sqrt(0.5)!r}}}> ()
"""
VALUES = {"one": 1.0, "half": 0.5, "root2": math.sqrt(2)}
BODY = """
    inner = Div(x, root2)
    e = Erf(inner)
    plus = Add(e, one)
    first = Mul(x, plus)
    y = Mul(first, half)
"""


def _model(body: str = BODY, outputs: str = "float[N, 5] y") -> ir.Model:
    return parse(
        f"g (float[N, 5] x, float[N, 5] z) => ({outputs}) {{ {CONSTANTS} {body} }}",
        domains=f', "{INTERNAL_DOMAIN}" : 1, "my" : 1',
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"Div(x, root2)": "Mul(x, inverse)"},
        {"Div(x, root2)": "Mul(inverse, x)"},
        {"Add(e, one)": "Add(one, e)"},
        {"Mul(x, plus)": "Mul(plus, x)"},
        {"Mul(first, half)": "Mul(half, first)"},
        {"Mul(x, plus)": "Mul(plus, half)", "Mul(first, half)": "Mul(x, first)"},
        {
            "first = Mul(x, plus)": "first = Mul(x, half)",
            "y = Mul(first, half)": "y = Mul(first, plus)",
        },
    ],
)
def test_written_out(change: dict[str, str]) -> None:
    body = BODY
    for old, new in change.items():
        assert old in body
        body = body.replace(old, new)
    model = _model(body)
    marked = model.clone()
    patterns.mark_gelu(marked.graph)
    (node,) = (node for node in marked.graph if node.op_type != "Constant")
    assert (node.domain, node.op_type) == (INTERNAL_DOMAIN, "Gelu")
    assert marked.graph.outputs[0].name == "y"
    patterns.lower_gelu(Ops(marked.graph, "new/"), marked.graph)
    assert INTERNAL_DOMAIN not in {node.domain for node in marked.graph}
    marked.graph.opset_imports.pop(INTERNAL_DOMAIN)
    assert_same(model, check(marked), random_feeds(model, N=7))
    extremes = np.array([[-100, -5, 0, 5, 100]], np.float32)
    assert_same(model, marked, {"x": extremes, "z": extremes})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"Div(x, root2)": "Div(x, half)"}, id="another scale"),
        pytest.param({"Div(x, root2)": "Div(root2, x)"}, id="upside down"),
        pytest.param({"Div(x, root2)": "Mul(x, root2)"}, id="times the root"),
        pytest.param({"Div(x, root2)": "Add(x, inverse)"}, id="a sum inside"),
        pytest.param({"Add(e, one)": "Add(e, half)"}, id="another addend"),
        pytest.param({"Add(e, one)": "Sub(e, one)"}, id="minus one"),
        pytest.param({"Add(e, one)": "Mul(e, one)"}, id="times one"),
        pytest.param({"Add(e, one)": "Sub(one, e)"}, id="erfc"),
        pytest.param({"Mul(x, plus)": "Mul(z, plus)"}, id="another factor"),
        pytest.param({"Mul(x, plus)": "Mul(plus, plus)"}, id="a square"),
        pytest.param({"Mul(x, plus)": "Add(x, plus)"}, id="a sum"),
        pytest.param({"Mul(first, half)": "Mul(first, one)"}, id="not halved"),
        pytest.param({"Mul(first, half)": "Div(first, half)"}, id="doubled"),
        pytest.param({"Mul(first, half)": "Mul(first, z)"}, id="no number"),
        pytest.param({"Erf(inner)": "Tanh(inner)"}, id="another function"),
        pytest.param({"Erf(inner)": "my.Erf(inner)"}, id="another domain"),
        pytest.param({"Add(e, one)": "my.Add(e, one)"}, id="another domain's sum"),
        pytest.param({"Mul(x, plus)": "my.Mul(x, plus)"}, id="another domain's product"),
    ],
)
def test_something_else(change: dict[str, str]) -> None:
    body = BODY
    for old, new in change.items():
        assert old in body
        body = body.replace(old, new)
    _assert_unchanged(_model(body))


@pytest.mark.parametrize("name", ["one", "half", "root2"])
def test_a_number_with_more_axes_adds_them(name: str) -> None:
    """The result is [1, N, 5] then."""
    wide = f"wide = Constant <value = float[1, 1, 1] {{{VALUES[name]!r}}}> ()"
    body = BODY.replace(f", {name})", ", wide)")
    assert body != BODY
    _assert_unchanged(_model(wide + body, "float[1, N, 5] y"))


@pytest.mark.parametrize("name", ["inner", "e", "plus", "first"])
def test_a_part_is_read_elsewhere(name: str) -> None:
    both = "float[N, 5] y, float[N, 5] other"
    _assert_unchanged(_model(BODY + f"other = Neg({name})", both))
    _assert_unchanged(_model(BODY, f"float[N, 5] y, float[N, 5] {name}"))


def _assert_unchanged(model: ir.Model) -> None:
    before = outline(model)
    patterns.mark_gelu(model.graph)
    patterns.lower_gelu(Ops(model.graph, "new/"), model.graph)
    assert outline(model) == before


def test_two_of_them() -> None:
    def gelu_of(x: str, y: str) -> str:
        return f"""
            {y}_inner = Div({x}, root2)
            {y}_e = Erf({y}_inner)
            {y}_plus = Add({y}_e, one)
            {y}_first = Mul({x}, {y}_plus)
            {y} = Mul({y}_first, half)
        """

    model = _model(gelu_of("x", "w") + gelu_of("w", "y"))
    marked = model.clone()
    patterns.mark_gelu(marked.graph)
    assert op_types(marked.graph).count("Gelu") == 2
    patterns.lower_gelu(Ops(marked.graph, "new/"), marked.graph)
    assert_same(model, marked, random_feeds(model, N=2))
