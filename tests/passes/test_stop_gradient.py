"""A held value is a constant to the gradient and itself to everybody else."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from odtpack.autodiff import differentiate
from odtpack.autodiff.backward import lower, stop
from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.graph.ops import Ops


@pytest.fixture
def x() -> ir.Value:
    return ir.val("x", dtype=ir.DataType.FLOAT, shape=[3])


def test_no_gradient_flows(x: ir.Value) -> None:
    """x times held x has the gradient held x, not twice x."""
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17}, name="g")
    op = Ops(graph)
    held = stop(op, x)
    y = op.Mul(x, held)
    y.shape = x.shape
    dy = ir.val("dy", dtype=ir.DataType.FLOAT, shape=[3])
    graph.inputs.append(dy)
    graph.outputs.append(y)
    (gradient,) = differentiate(graph, {y: dy}, [x], op).values()
    graph.outputs.append(gradient)
    producer = gradient.producer()
    assert producer is not None
    assert producer.op_type == "Mul"
    assert set(producer.inputs) == {dy, held}
    lower(graph)
    assert [node.op_type for node in graph] == ["Mul", "Mul"]
    assert set(producer.inputs) == {dy, x}
    assert graph.opset_imports == {"": 17}


def test_a_held_output(x: ir.Value) -> None:
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17}, name="g")
    op = Ops(graph)
    graph.outputs.append(stop(op, op.Neg(x)))
    lower(graph)
    assert [node.op_type for node in graph] == ["Neg"]
    assert graph.outputs[0].producer() is graph[0]


def test_other_graphs_do_not_change(x: ir.Value) -> None:
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17, INTERNAL_DOMAIN: 1}, name="g")
    graph.outputs.append(Ops(graph).Identity(x))
    lower(graph)
    assert [node.op_type for node in graph] == ["Identity"]
