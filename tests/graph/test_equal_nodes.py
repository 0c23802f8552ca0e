"""Nodes that compute the same are merged, and only these."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from odtpack.graph import graphs


def merged(body: str, outputs: str = "float[3] y") -> list[str]:
    """The operators that are left of the nodes of a graph."""
    text = f'<ir_version: 9, opset_import: ["" : 18]> g (float[3] x) => ({outputs}) {{ {body} }}'
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    graphs.merge(graph)
    onnx.checker.check_model(ir.to_proto(ir.Model(graph, ir_version=9)))
    return [node.op_type for node in graph]


def test_equal_nodes_become_one_and_then_their_readers_do() -> None:
    body = "a = Neg(x) b = Neg(x) c = Exp(a) d = Exp(b) y = Add(c, d)"
    assert merged(body) == ["Neg", "Exp", "Add"]


def test_outputs_keep_nodes_of_their_own() -> None:
    assert merged("y = Neg(x) z = Neg(x)", "float[3] y, float[3] z") == ["Neg", "Neg"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Softmax<axis = 0>(x)", "Softmax<axis = -1>(x)"),
        ("Neg(x)", "Abs(x)"),
        ("Bernoulli(x)", "Bernoulli(x)"),
        ("Dropout(x)", "Dropout(x)"),
        ("RandomNormalLike(x)", "RandomNormalLike(x)"),
    ],
)
def test_others_stay_as_they_are(left: str, right: str) -> None:
    assert len(merged(f"a = {left} b = {right} y = Add(a, b)")) == 3


def test_an_output_that_only_one_of_them_has_is_computed() -> None:
    body = "a = MaxPool<kernel_shape = [1]>(i) b, at = MaxPool<kernel_shape = [1]>(i)"
    body = f"i = Unsqueeze(x, n) {body} f = Cast<to = 1>(at) c = Add(a, b) y = Add(c, f)"
    body = f"n = Constant<value = int64[2] {{0, 1}}>() {body}"
    assert merged(body, "float[1, 1, 3] y").count("MaxPool") == 2
