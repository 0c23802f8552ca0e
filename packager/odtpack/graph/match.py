"""Small questions that several passes ask of a graph."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir


def scalar(value: ir.Value | None) -> float | None:
    """The number that a constant of one element holds, else None."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1:
        return None
    return float(np.asarray(tensor.numpy()).reshape(-1)[0])


def is_scalar(value: ir.Value | None, wanted: float) -> bool:
    """Whether a value is a constant close to ``wanted``, as float32 goes."""
    number = scalar(value)
    return number is not None and bool(np.isclose(number, wanted, rtol=1e-6, atol=0))


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that computes ``value``, if it is a standard operator of one of the types."""
    node = None if value is None else value.producer()
    if node is None or node.domain not in ("", "ai.onnx") or node.op_type not in op_types:
        return None
    return node


def split_scalar(node: ir.Node | None, wanted: float) -> ir.Value | None:
    """The other operand of a commutative node one of whose operands is the constant ``wanted``."""
    if node is None or len(node.inputs) != 2:
        return None
    left, right = node.inputs
    if is_scalar(right, wanted):
        return left
    return right if is_scalar(left, wanted) else None


def same_rank(left: ir.Value | None, right: ir.Value | None) -> bool:
    """Whether two values are known to have as many axes.

    A constant of one element may be written with more axes than what it is combined with,
    [1, 1, 1], and gives them to the result.
    """
    if left is None or right is None or left.shape is None or right.shape is None:
        return False
    return left.shape.rank() == right.shape.rank()


def private(nodes: Iterable[ir.Node], last: ir.Node) -> bool:
    """Whether only these nodes read what they compute, apart from the result of ``last``."""
    inside = set(nodes) | {last}
    return all(
        not value.is_graph_output() and all(user in inside for user in value.consumers())
        for node in inside - {last}
        for value in node.outputs
    )


def replace(old: ir.Value, new: ir.Value, nodes: Iterable[ir.Node]) -> None:
    """Let ``new`` take the name and the place of ``old``, and remove ``nodes``, last first."""
    new.type, new.shape = old.type, old.shape
    name, old.name = old.name, None
    new.name = name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    for node in nodes:
        if node.graph is not None:
            node.graph.remove(node, safe=True)
