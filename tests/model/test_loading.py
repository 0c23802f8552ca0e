"""Models that are hostile or odd before anything is differentiated."""

from __future__ import annotations

import onnx.parser
import pytest

from odtpack.graph.graphs import dims_of
from odtpack.model.loading import load_model


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


@pytest.mark.parametrize("before", ["", "n = NonZero(x) flat = Cast<to = 1>(n)"])
def test_shapes_from_before_an_input_was_made_dynamic_do_not_count(before: str) -> None:
    """``batch`` is any number, whatever is declared behind it; 4 is computed, and stays."""
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 8, opset_import: ["": 17]>
        g (float[batch, 4] x, float[4] w) => (float[1, 2, 2] y)
        <float[1, 4] h, float[1, 4] r, int64[3] shape = {{0, 2, 2}}>
        {{
            {before}
            h = Mul(x, w)
            r = Relu(h)
            y = Reshape(r, shape)
        }}
        """
    )
    graph = load_model(model).graph
    shapes = {value.name: dims_of(value) for node in graph for value in node.outputs}
    assert shapes["h"] == shapes["r"] == ("batch", 4)
    assert shapes["y"] == ("batch", 2, 2)


def test_the_standard_domain_may_be_imported_by_its_long_name() -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["ai.onnx": 17]>
        g (float[2, 4] x, float[4] w) => (float[2, 4] y) { y = Mul(x, w) }
        """
    )
    loaded = load_model(model)
    assert loaded.graph.opset_imports == {"": 17}
    assert [node.op_type for node in loaded.graph] == ["Mul"]


def test_a_size_of_minus_one_is_any_number() -> None:
    """Some exporters write a dynamic batch so, and ONNX Runtime takes it as one."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        g (float[batch, 4] x, float[4] w) => (float[batch, 4] y) { y = Mul(x, w) }
        """
    )
    for info in (model.graph.input[0], model.graph.output[0]):
        info.type.tensor_type.shape.dim[0].dim_value = -1
    graph = load_model(model).graph
    for value in (graph.inputs[0], graph.outputs[0]):
        batch, width = dims_of(value) or ()
        assert (isinstance(batch, int), width) == (False, 4)
