"""Recognizes a layer normalization that an exporter wrote out, and writes one node.

    mean = ReduceMean(x, last axes);  d = Sub(x, mean)
    y = Add(Mul(Div(d, Sqrt(Add(ReduceMean(Pow(d, 2) or Mul(d, d)), epsilon))), scale), bias)

becomes LayerNormalization(x, scale, bias), whose gradient reads only x and two numbers a
row. Written out, differentiation would keep five tensors of the size of x. The operator
stands in the standard since opset 17; older models are left alone.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.rules.reduce import reduced_axes
from odtpack.graph import match
from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops

_SINCE = 17


def rewrite(op: Ops, graph: ir.Graph) -> bool:
    """Rewrite every layer normalization; return whether there was one."""
    if op.opset < _SINCE:
        return False
    changed = False
    for node in list(graph):
        # The operator's epsilon is a float32, and so may its statistics be: not for doubles.
        if node.outputs[0].dtype == ir.DataType.DOUBLE:
            continue
        if node.graph is graph and node.op_type == "Add" and not node.domain:
            changed = _rewrite_one(op, node) or changed
    return changed


def _rewrite_one(op: Ops, add: ir.Node) -> bool:
    for scaled, bias in (add.inputs, reversed(add.inputs)):
        scale_node = match.producer(scaled, "Mul")
        if scale_node is None:
            continue
        for normal, scale in (scale_node.inputs, reversed(scale_node.inputs)):
            found = _normalized(op, normal)
            if found is None or scale is None or bias is None:
                continue
            x, axis, epsilon, nodes = found
            if not _is_row(scale, x, axis) or not _is_row(bias, x, axis):
                continue
            if not match.private([*nodes, scale_node], add) or not match.same_rank(
                x, add.outputs[0]
            ):
                continue
            with op.before(add):
                y = op.LayerNormalization(x, scale, bias, axis=axis, epsilon=epsilon)
            match.replace(add.outputs[0], y, [add, scale_node, *nodes])
            return True
    return False


def _normalized(
    op: Ops, value: ir.Value | None
) -> tuple[ir.Value, int, float, list[ir.Node]] | None:
    """(x, first normalized axis, epsilon, nodes from last to first) of d / sqrt(var + eps)."""
    divide = match.producer(value, "Div")
    if divide is None:
        return None
    centered = divide.inputs[0]
    root = match.producer(divide.inputs[1], "Sqrt")
    plus = match.producer(root.inputs[0], "Add") if root else None
    subtract = match.producer(centered, "Sub")
    if root is None or plus is None or subtract is None or centered is None:
        return None
    operands = [(v, match.scalar(w)) for v, w in (plus.inputs, reversed(plus.inputs))]
    variance, epsilon = next(((v, e) for v, e in operands if e is not None), (None, None))
    mean_square = match.producer(variance, "ReduceMean")
    square = match.producer(mean_square.inputs[0], "Pow", "Mul") if mean_square else None
    mean = match.producer(subtract.inputs[1], "ReduceMean")
    x = subtract.inputs[0]
    if mean_square is None or square is None or mean is None or x is None or epsilon is None:
        return None
    if mean.inputs[0] is not x or square.inputs[0] is not centered:
        return None
    is_square = (
        match.is_scalar(square.inputs[1], 2.0)
        if square.op_type == "Pow"
        else square.inputs[1] is centered
    )
    axis = _trailing_axis(op, mean, x)
    if not is_square or axis is None or axis != _trailing_axis(op, mean_square, x):
        return None
    return x, axis, epsilon, [divide, root, plus, mean_square, square, subtract, mean]


def _trailing_axis(op: Ops, node: ir.Node, x: ir.Value) -> int | None:
    """First of the reduced axes, if they are the last ones and are kept."""
    dims = dims_of(x)
    if dims is None or not node.attributes.get_int("keepdims", 1):
        return None
    axes = reduced_axes(Context(node, op, [], []))
    return axes[0] if axes and axes == list(range(axes[0], len(dims))) else None


def _is_row(value: ir.Value, x: ir.Value, axis: int) -> bool:
    """Whether a scale or bias has exactly the normalized shape."""
    dims, whole = dims_of(value), dims_of(x)
    # Two sizes that are unknown need not be equal.
    known = dims is not None and None not in dims
    return known and whole is not None and dims == whole[axis:]
