"""Recognizes what exporters write out: layer normalization, GELU and the like."""

from __future__ import annotations

import math

import onnx_ir as ir

from odtpack.autodiff.context import INTERNAL_DOMAIN, Context
from odtpack.autodiff.rules.reduce import reduced_axes
from odtpack.graph import graphs
from odtpack.graph.graphs import Ops, dims_of

# Recognizes a layer normalization that an exporter wrote out, and writes one node.
#
#     mean = ReduceMean(x, last axes);  d = Sub(x, mean)
#     y = Add(Mul(Div(d, Sqrt(Add(ReduceMean(Pow(d, 2) or Mul(d, d)), epsilon))), scale), bias)
#
# becomes LayerNormalization(x, scale, bias), whose gradient reads only x and two numbers a
# row. Written out, differentiation would keep five tensors of the size of x. The operator
# stands in the standard since opset 17; older models are left alone.

_SINCE = 17


def fuse_layer_norm(op: Ops, graph: ir.Graph) -> bool:
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
        scale_node = graphs.producer(scaled, "Mul")
        if scale_node is None:
            continue
        for normal, scale in (scale_node.inputs, reversed(scale_node.inputs)):
            found = _normalized(op, normal)
            if found is None or scale is None or bias is None:
                continue
            x, axis, epsilon, nodes = found
            if not _is_row(scale, x, axis) or not _is_row(bias, x, axis):
                continue
            if not graphs.private([*nodes, scale_node], add) or not graphs.same_rank(
                x, add.outputs[0]
            ):
                continue
            with op.before(add):
                y = op.LayerNormalization(x, scale, bias, axis=axis, epsilon=epsilon)
            graphs.replace(add.outputs[0], y, [add, scale_node, *nodes])
            return True
    return False


def _normalized(
    op: Ops, value: ir.Value | None
) -> tuple[ir.Value, int, float, list[ir.Node]] | None:
    """(x, first normalized axis, epsilon, nodes from last to first) of d / sqrt(var + eps)."""
    divide = graphs.producer(value, "Div")
    if divide is None:
        return None
    centered = divide.inputs[0]
    root = graphs.producer(divide.inputs[1], "Sqrt")
    plus = graphs.producer(root.inputs[0], "Add") if root else None
    subtract = graphs.producer(centered, "Sub")
    if root is None or plus is None or subtract is None or centered is None:
        return None
    operands = [(v, graphs.scalar(w)) for v, w in (plus.inputs, reversed(plus.inputs))]
    variance, epsilon = next(((v, e) for v, e in operands if e is not None), (None, None))
    mean_square = graphs.producer(variance, "ReduceMean")
    square = graphs.producer(mean_square.inputs[0], "Pow", "Mul") if mean_square else None
    mean = graphs.producer(subtract.inputs[1], "ReduceMean")
    x = subtract.inputs[0]
    if mean_square is None or square is None or mean is None or x is None or epsilon is None:
        return None
    if mean.inputs[0] is not x or square.inputs[0] is not centered:
        return None
    is_square = (
        graphs.is_scalar(square.inputs[1], 2.0)
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


# Gives a GELU that an exporter wrote out the gradient of the whole.
#
#     y = x (1 + erf(x / sqrt 2)) / 2, in any order of the factors
#
# is replaced by an internal operator before differentiation (:func:`mark`), so that its
# gradient reads only x, and written out again after it (:func:`lower`), in the order that
# ONNX Runtime fuses into one kernel. Written out, differentiation would keep three tensors.


def mark_gelu(graph: ir.Graph) -> None:
    """Replace every written-out GELU by the internal operator."""
    for erf in list(graph):
        if erf.op_type != "Erf" or erf.domain or erf.graph is not graph:
            continue
        found = _find(erf)
        if found is None:
            continue
        x, nodes = found
        last = nodes[0]
        new = ir.node("Gelu", [x], domain=INTERNAL_DOMAIN, name=last.name)
        graph.insert_before(last, new)
        graphs.replace(last.outputs[0], new.outputs[0], nodes)


def _find(erf: ir.Node) -> tuple[ir.Value, list[ir.Node]] | None:
    """(x, nodes from last to first) of the GELU around an Erf."""
    inner = graphs.producer(erf.inputs[0], "Div", "Mul")
    plus = _only_user(erf, "Add")
    if inner is None or plus is None:
        return None
    if inner.op_type == "Div":
        x = inner.inputs[0] if graphs.is_scalar(inner.inputs[1], math.sqrt(2)) else None
    else:
        x = graphs.split_scalar(inner, math.sqrt(0.5))
    if x is None or graphs.split_scalar(plus, 1.0) is not erf.outputs[0]:
        return None
    # Two products follow, with x and with 1/2, in either order, or x/2 comes from outside.
    first = _only_user(plus, "Mul")
    if first is None:
        return None
    other = next((v for v in first.inputs if v is not plus.outputs[0]), None)
    if other is not x and not graphs.is_scalar(other, 0.5):
        half = graphs.producer(other, "Mul")
        if half is None or graphs.split_scalar(half, 0.5) is not x:
            return None
        nodes = [first, plus, erf, inner, half]
    else:
        second = _only_user(first, "Mul")
        if second is None:
            return None
        last = next((v for v in second.inputs if v is not first.outputs[0]), None)
        if {other is x, last is x} != {True, False}:
            return None
        if not graphs.is_scalar(other if last is x else last, 0.5):
            return None
        nodes = [second, first, plus, erf, inner]
    found = graphs.private(nodes, nodes[0]) and graphs.same_rank(x, nodes[0].outputs[0])
    return (x, nodes) if found else None


def _only_user(node: ir.Node, op_type: str) -> ir.Node | None:
    """The one node that reads a node's output, if it is a standard operator of that type."""
    users = list(node.outputs[0].consumers())
    if len(users) != 1 or users[0].domain or users[0].op_type != op_type:
        return None
    return users[0]


def lower_gelu(op: Ops, graph: ir.Graph) -> None:
    """Write the internal operators out again."""
    for node in list(graph):
        if node.op_type == "Gelu" and node.domain == INTERNAL_DOMAIN:
            x = node.inputs[0]
            with op.before(node):
                # Div, not Mul: the gradient has the Mul, and a shared node would keep the
                # runtime from fusing these five.
                grown = op.Add(op.Erf(op.Div(x, math.sqrt(2))), 1.0)
                y = op.Mul(op.Mul(x, grown), 0.5)
            graphs.replace(node.outputs[0], y, [node])


# Recognizes simulated quantization, so that it can be trained through.
#
#     QuantizeLinear(x, scale, zero) -> DequantizeLinear(levels, scale, zero)
#
# Before differentiation :func:`mark` replaces the second of such a pair by an internal
# operator FakeQuant(x, scale, zero, levels), whose gradient rule is the straight-through
# estimator; :func:`lower` puts it back after it. The forward pass rounds as before.
#
# A pair must agree in scale, zero point, axis and block size, and its integer type must have
# at most 16 bits. No gradient passes any other QuantizeLinear.

OP_TYPE = "FakeQuant"

_BOUNDS = {
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-(2**15), 2**15 - 1),
    ir.DataType.UINT16: (0, 2**16 - 1),
}
_WHERE = {"axis": 1, "block_size": 0}  # attributes that say where a scale applies


def mark_fake_quant(graph: ir.Graph) -> None:
    """Replace every pair's DequantizeLinear by the internal operator."""
    for node in list(graph):
        if node.op_type != "DequantizeLinear" or node.domain:
            continue
        levels = node.inputs[0]
        quantize = graphs.producer(levels, "QuantizeLinear")
        if quantize is None or levels is None or not _is_pair(quantize, node):
            continue
        low, high = _BOUNDS[levels.dtype or ir.DataType.UINT8]
        new = ir.node(
            OP_TYPE,
            [*quantize.inputs[:2], _zero_point(quantize), levels],
            {"low": low, "high": high},
            domain=INTERNAL_DOMAIN,
            name=node.name,
        )
        new.attributes.update(node.attributes)
        graph.insert_before(node, new)
        graphs.replace(node.outputs[0], new.outputs[0], [node])


def _is_pair(quantize: ir.Node, dequantize: ir.Node) -> bool:
    ours, theirs = (
        (n.inputs[1], _zero_point(n), *(n.attributes.get_int(*each) for each in _WHERE.items()))
        for n in (quantize, dequantize)
    )
    return quantize.outputs[0].dtype in _BOUNDS and ours == theirs


def _zero_point(node: ir.Node) -> ir.Value | None:
    return node.inputs[2] if len(node.inputs) > 2 else None


def lower_fake_quant(graph: ir.Graph) -> None:
    """Put the DequantizeLinear nodes back."""
    for node in list(graph):
        if node.op_type != OP_TYPE or node.domain != INTERNAL_DOMAIN:
            continue
        _, scale, zero, levels = node.inputs
        new = ir.node(
            "DequantizeLinear", [levels, scale] + [zero] * (zero is not None), name=node.name
        )
        kept = {k: v for k, v in node.attributes.items() if k not in ("low", "high")}
        new.attributes.update(kept)
        graph.insert_before(node, new)
        graphs.replace(node.outputs[0], new.outputs[0], [node])


# Moves a Relu after the MaxPool that alone reads it.
#
# max(relu(a), relu(b)) = relu(max(a, b)), and so are the gradients: the maximum passes its
# cotangent on exactly if it is positive. On the pooled plane the Relu and its mask touch a
# quarter of the elements, and the large plane is read once less.


def pool_before_relu(op: Ops, graph: ir.Graph) -> bool:
    """Swap every such pair; return whether there was one."""
    changed = False
    for pool in list(graph):
        if pool.op_type != "MaxPool" or pool.domain or len(pool.outputs) > 1:
            continue
        relu = graphs.producer(pool.inputs[0], "Relu")
        if relu is None or not graphs.private([relu], pool):
            continue
        x, pooled = relu.inputs[0], pool.outputs[0]
        with op.before(pool):
            y = op.again(pool, [x])[0]
            y.shape = pooled.shape
            new = op.Relu(y)
        graphs.replace(pooled, new, [pool, relu])
        changed = True
    return changed
