"""Models that are hostile or odd before anything is differentiated."""

from __future__ import annotations

import onnx.parser

from odtpack.loading import load_model


def test_a_vector_declared_absurdly_long_is_not_propagated() -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        g (int64[1000000000000] a, int64[1000000000000] b, float[2] x) => (float[2] y) {
            c = Add(a, b)
            y = Relu(x)
        }
        """
    )
    assert load_model(model).graph.outputs[0].name == "y"


def test_absent_inputs_at_the_end_of_a_node_are_dropped() -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        g (float[2, 4] x, float[4] scale) => (float[2, 4] y) {
            y = LayerNormalization(x, scale, )
        }
        """
    )
    (node,) = load_model(model).graph
    assert [value.name for value in node.inputs if value is not None] == ["x", "scale"]
    assert len(node.inputs) == 2
