"""Finds nodes whose results are discarded in places, where they may be NaN or infinite.

A model may compute a value, and discard it where it makes no sense:

    p = Where(IsNaN(p0), 0, p0), p0 = Softmax(scores + mask)      a row that is masked as a whole
    y = Where(x > 0, Log(x), 0)                                   an argument without a logarithm

There the cotangent is zero, and its product with a slope that is NaN or infinite would be
NaN. Rules of the nodes found here take such a product as zero (:meth:`Context.discarded`).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import reads

_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE}

# Functions that are infinite or NaN somewhere, or whose slope is.
_SINGULAR = {
    "Acos", "Acosh", "Asin", "Atanh", "Cosh", "Div", "Exp", "Log", "Pow", "Reciprocal", "Sinh",
    "Sqrt", "Tan",
}  # fmt: skip
# Rules of these multiply the cotangent by a slope, element by element.
SCALING = _SINGULAR | {
    "Abs", "Asinh", "Atan", "Celu", "Cos", "Elu", "Erf", "Gelu", "Mul", "Sigmoid", "Sin",
    "Softplus", "Softsign", "Swish", "Tanh",
}  # fmt: skip
_ROWS = {"Softmax", "LogSoftmax"}
# Of a sound model their results are finite, or lost for good.
_MIXING = {
    "BatchNormalization", "Conv", "ConvTranspose", "DeformConv", "Einsum", "GRU", "Gemm",
    "GroupNormalization", "If", "InstanceNormalization", "LSTM", "LayerNormalization", "Loop",
    "MatMul", "RMSNormalization", "RNN", "Scan",
}  # fmt: skip
_LARGEST_MASK = 1 << 24  # elements; a larger constant is a weight
_MOVING = {
    "Add", "Cast", "CastLike", "Concat", "Dropout", "Expand", "Flatten", "Gather", "Identity",
    "Neg", "Reshape", "Slice", "Split", "Squeeze", "Sub", "Sum", "Transpose", "Unsqueeze",
}  # fmt: skip
_PASSING = SCALING | _ROWS | _MOVING


def find(graph: ir.Graph, sources: set[ir.Value]) -> set[ir.Node]:
    """Nodes whose rules must not multiply a zero cotangent by what may not be finite."""
    # graph: In topological order. sources: Values that are differentiated, which are taken to be
    # finite.
    candidates = _discarded(graph)
    if not candidates:
        return set()
    unsafe = _may_be_infinite(graph, candidates, sources)
    return {
        node
        for node in candidates
        if node.op_type in SCALING | _ROWS and any(y in unsafe for y in node.outputs)
    }


def _discarded(graph: ir.Graph) -> set[ir.Node]:
    """Nodes of which a Where picks elements, with only element-wise ones and views between."""
    values: set[ir.Value | None] = set()
    nodes = set()
    for node in reversed(graph):
        if node.domain:
            continue
        if node.op_type == "Where":
            values.update(node.inputs[1:])
        elif node.op_type in _PASSING and any(y in values for y in node.outputs):
            nodes.add(node)
            values.update(node.inputs)
    return nodes


def _may_be_infinite(
    graph: ir.Graph, candidates: set[ir.Node], sources: set[ir.Value]
) -> set[ir.Value]:
    """Values that may hold NaN or infinities though the model is sound."""
    # Only what ``candidates`` are computed from is looked at: weights are large.
    relevant, stack = set(candidates), list(candidates)
    while stack:
        producers = (value.producer() for value in reads(stack.pop()))
        new = {n for n in producers if n is not None and n.op_type not in _MIXING} - relevant
        relevant |= new
        stack.extend(new)
    fixed: set[ir.Value] = set()  # computed from constants and shapes only
    found: set[ir.Value] = set()

    def look_at(value: ir.Value) -> None:
        if value.producer() is not None or value in sources or value in fixed:
            return
        if value.const_value is None:
            if value.dtype in _FLOATS:
                found.add(value)
            return
        fixed.add(value)
        if _holds_infinite(value.const_value):
            found.add(value)

    for node in graph:
        if node not in relevant:
            continue
        inputs = list(reads(node))
        for value in inputs:
            look_at(value)
        if node.op_type in ("Shape", "Size", "Constant") or all(v in fixed for v in inputs):
            fixed.update(node.outputs)
        if _makes_infinite(node, fixed) or _passes_infinite(node, found, fixed):
            found.update(node.outputs)
    return found


def _makes_infinite(node: ir.Node, fixed: set[ir.Value]) -> bool:
    """Whether a node computes, or holds, infinities of its own."""
    if node.op_type == "Constant":
        return _holds_infinite(ir.convenience.get_const_tensor(node.outputs[0]))
    if node.op_type == "ConstantOfShape":
        return _holds_infinite(node.attributes.get_tensor("value", None))
    if node.op_type not in _SINGULAR or _is_tame(node, fixed):
        return False
    return node.op_type == "Log" or not all(value in fixed for value in reads(node))


def _passes_infinite(node: ir.Node, found: set[ir.Value], fixed: set[ir.Value]) -> bool:
    """Whether infinities of what a node reads are in what it computes."""
    if node.op_type == "Where":  # what it discards is the matter here
        return any(v in found and v in fixed for v in node.inputs[1:] if v is not None)
    return node.op_type not in _MIXING and any(value in found for value in reads(node))


def _holds_infinite(tensor: ir.TensorProtocol | None) -> bool:
    if tensor is None or tensor.dtype not in _FLOATS or tensor.size > _LARGEST_MASK:
        return False
    return not bool(np.isfinite(tensor.numpy()).all())


def _is_tame(node: ir.Node, fixed: set[ir.Value]) -> bool:
    """Whether a function that is singular somewhere is so nowhere, for the operand that it has."""
    # A known divisor is not zero in a sound model; a whole exponent of one or more has a slope
    # everywhere.
    if node.op_type == "Div":
        return node.inputs[1] in fixed
    power = node.inputs[1] if node.op_type == "Pow" else None
    exponent = None if power is None else ir.convenience.get_const_tensor(power)
    if exponent is None:
        return False
    numbers = np.asarray(exponent.numpy(), np.float64)
    return bool((numbers >= 1).all() and (numbers == np.round(numbers)).all())
