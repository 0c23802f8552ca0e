"""Models that are hostile or odd before anything is differentiated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from odtpack import optimizers
from odtpack.build import build_package
from odtpack.graph.graphs import dims_of
from odtpack.model.loading import load_model
from odtpack_runtime import CheckpointState, Module, Optimizer


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


def test_annotations_that_contradict_the_graph_do_not_count() -> None:
    """ONNX Runtime ignores them. Believed, they leave out a sum over the samples, in silence."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        g (float[5, 6] x, float[5] t) => (float y)
        <float[1, 4] h, float[1, 4] b, float[7, 7, 7] s, int32[3] d, float e, float[5, 4] u>
        {
            h = MatMul(x, w)
            b = Add(h, bias)
            s = ReduceSum<keepdims = 0>(b, one)
            d = Sub(s, t)
            e = Mul(d, d)
            u = Custom(e)
            y = ReduceMean<keepdims = 0>(e)
        }
        """
    )
    for name, array in {
        "w": np.ones((6, 4), np.float32), "bias": np.zeros(4, np.float32), "one": np.array([1])
    }.items():  # fmt: skip
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    model.graph.node[5].domain = "custom"
    model.opset_import.add(domain="custom", version=1)
    graph = load_model(model).graph
    shapes = {value.name: dims_of(value) for node in graph for value in node.outputs}
    assert shapes["h"] == shapes["b"] == (5, 4)
    assert shapes["s"] == shapes["d"] == shapes["e"] == (5,)
    assert shapes["u"] == (5, 4)  # nothing else says what the operator makes
    assert {value.dtype for node in graph for value in node.outputs} == {ir.DataType.FLOAT}


def test_a_bias_behind_a_wrong_annotation_has_the_right_gradient(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        g (float[5, 3] x) => (float[5, 4] y) <float[1, 4] h, float[1, 4] y>
        { h = MatMul(x, w)
          y = Add(h, bias) }
        """
    )
    rng = np.random.default_rng(2)
    w, bias, x = (rng.normal(size=s).astype(np.float32) for s in ((3, 4), (4,), (5, 3)))
    target = rng.normal(size=(5, 4)).astype(np.float32)
    for name, array in {"w": w, "bias": bias}.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    build_package(model, tmp_path, loss="mse", optimizer=optimizers.SGD(), self_check=False)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(1.0)
    module(x, target)
    optimizer.step()
    expected = bias - (2 * (x @ w + bias - target) / 20).sum(axis=0)
    np.testing.assert_allclose(state.parameters["bias"].data, expected, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("size", [-1, "-1", "?"])
def test_what_is_not_a_size_is_any_number(size: int | str) -> None:
    """Some exporters write a dynamic batch so, and ONNX Runtime takes it as one."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        g (float[batch, 4] x, float[4] w) => (float[batch, 4] y) { y = Mul(x, w) }
        """
    )
    for info in (model.graph.input[0], model.graph.output[0]):
        dim = info.type.tensor_type.shape.dim[0]
        setattr(dim, "dim_value" if isinstance(size, int) else "dim_param", size)
    graph = load_model(model).graph
    for value in (graph.inputs[0], graph.outputs[0]):
        batch, width = dims_of(value) or ()
        assert (batch in (-1, size) or isinstance(batch, int), width) == (False, 4)


def test_a_reshape_to_computed_sizes_has_a_rank() -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 12]>
        g (float[n, t, 4] x, float[4] w) => (float[rows, 4] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] four = {4}> {
          shape = Shape(x) n = Gather(shape, zero) t = Gather(shape, one) nt = Mul(n, t)
          flat = Reshape(nt, one1) sizes = Concat <axis = 0> (flat, four) z = Reshape(x, sizes)
          y = Mul(z, w)
        }
        """
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one1"))
    reshape = next(
        node for node in load_model(model).graph if "z" in [v.name for v in node.outputs]
    )
    rows, width = dims_of(reshape.outputs[0]) or ()
    assert (isinstance(rows, int), width) == (False, 4)
